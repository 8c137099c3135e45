"""What is asked of a model from outside: requests over HTTP, and files of prompts."""
