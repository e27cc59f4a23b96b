"""Two environments train on one farm, with atropos' run-api and a trainer that checks what it gets."""
