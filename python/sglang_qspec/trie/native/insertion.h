// The result of inserting a chunk of draft tokens.

#pragma once

namespace qspec {

// The members of the Python enum `Insertion` in the same order, without the last one.
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
