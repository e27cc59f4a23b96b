"""From a tool call to its result: batching, sessions, the container's stream."""
