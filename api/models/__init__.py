"""The models that this process serves, and the check of grammars for them."""
