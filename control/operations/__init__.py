"""Operations of an operator: specifications of models, checks, reports; shared by the command line and the HTTP
API."""
