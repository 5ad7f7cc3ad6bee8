"""Pipelines of diffusers from configurations alone: no weights, no hub, no code of others.

`pipeline` loads one for a request: `spec` finds its configurations, `request` reads sizes and
steps, `classes` has a row for each class of pipelines, `denoisers`, `encoders` and `decoders` a
function for each class of components.
"""
