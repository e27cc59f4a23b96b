"""The dialects that programs speak: OpenAI's chat completions and responses, Anthropic's messages. Pure."""
