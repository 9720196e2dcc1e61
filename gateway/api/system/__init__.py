"""Health, lists of models, and the OpenAPI document."""
