"""Bridges to engines and trainers; each loads its library only when used."""
