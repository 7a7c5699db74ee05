"""The OpenAI-compatible HTTP interface, and the one service layer that it shares with the browser app."""

__version__ = "0.1.0"
