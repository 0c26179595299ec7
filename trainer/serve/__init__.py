"""The command `python -m trainer.serve`: a model over HTTP, by the protocol of OpenAI's completions and chats.

`protocol` says what a request may ask and how it is answered, `engine` generates for all that wait at once, `app` is
the ASGI application of both.

May import: trainer.checkpoints, trainer.distributed, trainer.generate, trainer.startup, input_pipeline, models.
"""
