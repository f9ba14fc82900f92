"""The models that this process serves, their files in processes of their own, and the check of grammars for them."""
