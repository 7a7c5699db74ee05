"""How the embedded demo model, its adapters and its sample audio were made.

Nothing here runs in the product. `README.md` beside this file lists the commands.
"""
