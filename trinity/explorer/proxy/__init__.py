"""Mode `serve`: a model behind an API that learns from what its users say of its replies."""
