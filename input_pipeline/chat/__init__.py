"""Conversations: what a row is by its columns, chat templates and their sandbox, and which characters are trained."""
