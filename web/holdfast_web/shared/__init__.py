"""Code and templates that several areas use: rendering, routing, forms, filters, static files, the page frame.

Entry points: `render.View`, `routing.error_page`, `assets.static_app`. Imports no area.
"""
