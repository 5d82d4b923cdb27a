// What became of a chunk of draft tokens.

#pragma once

namespace qspec {

// `Insertion` in Python, with the same numbers.
enum Insertion {
  kAdded = 0,
  kKnown,
  kNegative,
  kAhead,
  kGap,
  kConflict,
  kBadToken,
  kFull,
  kEvicted,
};

}  // namespace qspec
