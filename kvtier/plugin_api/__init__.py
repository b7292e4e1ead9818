"""What a third party's backend or policy may import."""
