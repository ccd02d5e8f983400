"""An OpenAI-compatible endpoint for agent programs: it records what they make the model write."""
