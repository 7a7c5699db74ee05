"""How the web app looks: a Gradio theme, the style sheet, the page's script, and a content security policy.

Knows nothing of tabs. Fonts are the ones that Gradio ships, in the two weights that are whole there (400 and 700), so
that nothing is loaded from another host.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import gradio as gr

from engine.config import EMBEDDED_ASSETS
from ui.text import LANGUAGES, Texts

LOGO = EMBEDDED_ASSETS / "logo.svg"
STYLE_SHEET = EMBEDDED_ASSETS / "css" / "app.css"
SCRIPT = EMBEDDED_ASSETS / "js" / "app.js"
CHAT_SCRIPT = EMBEDDED_ASSETS / "js" / "chat.js"
SCRIPT_WORDS = (
    "chat.composer", "adapters.cancel", "status.copied",
    "media.text", "media.audio", "media.image", "receipt.and", "attach.no_image", "attach.no_audio", "attach.no_file",
    "turn.delete", "toast.warning", "toast.error", "toast.success",
    "mic.insecure", "mic.unsupported", "mic.missing", "mic.denied", "mic.file", "mic.recording", "mic.stop", "mic.cancel",
)  # fmt: skip
# Gradio's templates and event scripts need 'unsafe-inline' and 'unsafe-eval'; images of other hosts are what must stay out,
# because a model's answer can name one.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' blob: data:; font-src 'self' data:; connect-src 'self' blob: data:; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; frame-ancestors 'self'"
)


def make_theme() -> gr.themes.Base:
    """Indigo on slate, one-pixel borders, no shadows."""
    sans = gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700))
    mono = gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700))
    return gr.themes.Base(
        primary_hue="indigo",
        neutral_hue="slate",
        font=[sans, "ui-sans-serif", "system-ui", "sans-serif"],
        font_mono=[mono, "ui-monospace", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_800",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_100",
        background_fill_secondary_dark="*neutral_800",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_border_width="1px",
        block_border_color="*neutral_200",
        block_border_color_dark="*neutral_800",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_800",
        block_shadow="none",
        block_shadow_dark="none",
        block_radius="12px",
        block_label_text_weight="400",
        block_title_text_weight="400",
        block_title_text_color="*neutral_600",
        block_title_text_color_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        input_background_fill="white",
        input_background_fill_dark="*neutral_800",
        input_border_color="*neutral_200",
        input_border_color_dark="*neutral_700",
        input_border_width="1px",
        input_radius="8px",
        input_shadow="none",
        input_shadow_focus="none",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_border_width="1px",
        button_large_radius="8px",
        button_medium_radius="8px",
        button_small_radius="8px",
        button_large_text_weight="700",
        button_medium_text_weight="700",
        button_small_text_weight="400",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_700",
        button_primary_text_color="white",
        button_primary_border_color="*primary_600",
        button_secondary_background_fill="white",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_dark="*neutral_900",
        button_secondary_background_fill_hover_dark="*neutral_800",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_700",
        button_secondary_text_color="*neutral_800",
        button_secondary_text_color_dark="*neutral_100",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="*neutral_800",
        slider_color="*primary_600",
        slider_color_dark="*primary_500",
        loader_color="*primary_600",
    )


def page_head(text: Texts) -> str:
    """What goes into the page's head: the styles, and the script with its words."""
    words = {language: {key: table[key] for key in SCRIPT_WORDS} for language, table in LANGUAGES.items()}
    script_words = json.dumps(words).replace("<", "\\u003c")
    return (
        f"<meta name='description' content='{escape(text('app.subtitle'))}'>"
        f"<style>{_read(STYLE_SHEET)}</style>"
        f"<script>window.switchboardWords = {script_words};\n{_read(SCRIPT)}\n{_read(CHAT_SCRIPT)}</script>"
    )


def logo_svg() -> str:
    """The logo as inline SVG."""
    return _read(LOGO)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
