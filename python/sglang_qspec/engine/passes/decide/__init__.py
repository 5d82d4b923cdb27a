"""What rank 0 decides about a pass: pipeline, trees and wait, and what it learns from results."""
