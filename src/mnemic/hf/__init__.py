"""The only place that knows the insides of transformers."""
