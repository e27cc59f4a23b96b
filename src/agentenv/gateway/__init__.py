"""The model API for agent programs in slots, in the protocols of OpenAI, Anthropic and Google."""
