"""The routes for programs that speak OpenAI's API or vLLM's (docs/openai.md). Each request becomes a sample like any
other (`api.operations.submit`), so limits, prices and scopes are those of `asample`."""
