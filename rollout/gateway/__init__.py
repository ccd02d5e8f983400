"""An OpenAI-compatible endpoint for agent programs; it records what the model writes for them."""
