"""A teacher: a model behind a server of OpenAI's chat completions that fills the Step-Trace
Buffer."""
