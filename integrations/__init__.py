"""Adapters for other projects' trainers (TRL, verl, slime, Megatron-core), Ray and environments.

Users and those trainers import them; they use Tidegate's public API, and the other project's
package.
"""
