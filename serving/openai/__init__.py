"""Completions for every API: request bodies, sampling options, turns being answered, answers.

Requests have OpenAI's form with vLLM's extensions; Anthropic's messages and OpenAI's responses
become chats of that form.
"""
