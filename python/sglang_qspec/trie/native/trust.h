// Estimates the probability that the next token of a matching stream is the target's.
//
// The estimate depends on the kind of the stream, on whether it is followed or found, and on the
// length of the match. A followed stream was drafted from exactly the committed text; a found one
// only has the same last tokens. The odds of a probability p are p / (1 - p).
//
// The priors were counted on recorded completions of SmolLM2-135M-Instruct (int8 drafts, sampled at
// temperature 0.6, six kinds of prompts); those of a head's drafts are those of step drafts, and those
// of Jacobi guesses are low. In a server, every committed token shows for every matching stream
// whether the stream was right. First guesses of the Jacobi iteration are nearly always wrong and
// teach nothing: they are there to be improved. A drafter's second choice for a token is right in a
// share of the cases in which its first one, and all other streams, are wrong. Each estimate is the mean of a beta posterior. Its
// counts are halved at a limit, so that the estimate follows changes of the load. One request's
// streams may be much better or worse than the streams of other requests, for example if a client
// guesses wrong. Each request therefore also learns its own factor (`Standing`).

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace qspec {

// The source of a draft token: `Source` in Python, with the same numbers.
enum Source : std::uint8_t {
  kQueue = 0,
  kGuess = 1,
  kPrompt = 2,
  kOutput = 3,
  kStep = 4,
  kHead = 5,
  kJacobi = 6,
  kSecond = 7,
  kSources = 8
};

// The name of each source in Python.
constexpr std::array<const char*, kSources> kNames = {"queue", "guess", "prompt", "output",
                                                  "step",  "head",  "jacobi", "second"};

// The kind of a stream: its source, with greedy and sampled queue drafts as two kinds, and so with
// Jacobi guesses that the target has improved and first ones.
enum Kind : std::uint8_t {
  kGreedy = 0,
  kSampled,
  kGuessed,
  kStepped,
  kOfPrompt,
  kOfOutput,
  kOfHead,
  kImproved,
  kFirst,
  kKinds
};

constexpr std::array<Source, kKinds> kSourceOf = {kQueue,  kQueue,  kGuess, kStep,
                                                  kPrompt, kOutput, kHead,  kJacobi, kJacobi};

// The kind of a stream that is inserted as a draft; kKinds for a source that is only looked up.
inline Kind draft_kind(int source, bool greedy) {
  switch (source) {
    case kQueue:
      return greedy ? kGreedy : kSampled;
    case kGuess:
      return kGuessed;
    case kStep:
      return kStepped;
    case kHead:
      return kOfHead;
    case kJacobi:
      return greedy ? kImproved : kFirst;
    default:
      return kKinds;
  }
}

// The estimates that all requests share.
class Trust {
 public:
  explicit Trust(int max_match, bool learns = true) : max_match_(max_match), learns_(learns) {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (bool followed : {false, true}) {
        std::vector<Chance>& row = rows_[kind][followed];
        for (int length = 0; length <= max_match; ++length) {
          const double chance = kPriors[kind][followed].chance(std::max(length, 1));
          row.push_back({chance, 0.0, 0.0, chance});
        }
      }
      seconds_[kind] = {kPriorSecond, 0.0, 0.0, kPriorSecond};
    }
  }

  int max_match() const { return max_match_; }
  bool learns() const { return learns_; }

  // `length` >= 1 is the number of matched tokens, a followed stream's context token included.
  double chance(Kind kind, bool followed, int length) const {
    return rows_[kind][followed][length].mean;
  }

  // Record whether the next token of a stream that matched like this was the target's.
  void observe(Kind kind, bool followed, int length, bool right) {
    if (learns_ && kind != kFirst) rows_[kind][followed][length].observe(right);
  }

  // The share of the drafter's second choices that are right where its first one is wrong.
  double second(Kind kind) const { return seconds_[kind].mean; }

  // Record whether the second choice was the target's token, after a wrong first one.
  void observe_second(Kind kind, bool right) {
    if (learns_) seconds_[kind].observe(right);
  }

 private:
  static constexpr double kPriorWeight = 32.0;  // weight of the prior in observations
  static constexpr double kMemory = 2048.0;
  static constexpr double kPriorSecond = 0.35;

  struct Prior {
    double first;   // probability at length 1
    double second;  // probability at length 2; it rises from there towards `most`
    double most;    // limit for long matches
    double pace;    // share of the distance to `most` that remains after each further token

    double chance(int length) const {
      return length < 2 ? first : most - (most - second) * std::pow(pace, length - 2);
    }
  };

  struct Chance {
    double prior, right, seen, mean;

    void observe(bool was_right) {
      right += was_right;
      seen += 1.0;
      if (seen >= kMemory) {
        right /= 2;
        seen /= 2;
      }
      mean = std::clamp((kPriorWeight * prior + right) / (kPriorWeight + seen), 0.01, 0.99);
    }
  };

  // For each kind: found, then followed. Own text is never followed.
  static constexpr Prior kPriors[kKinds][2] = {
      {{0.28, 0.60, 0.90, 0.87}, {0.85, 0.93, 0.985, 0.80}},
      {{0.18, 0.48, 0.86, 0.87}, {0.58, 0.70, 0.91, 0.80}},
      {{0.25, 0.55, 0.95, 0.80}, {0.40, 0.65, 0.95, 0.75}},
      {{0.28, 0.60, 0.90, 0.87}, {0.90, 0.95, 0.985, 0.80}},
      {{0.12, 0.45, 0.93, 0.85}, {0.12, 0.45, 0.93, 0.85}},
      {{0.20, 0.52, 0.95, 0.87}, {0.20, 0.52, 0.95, 0.87}},
      {{0.28, 0.60, 0.90, 0.87}, {0.90, 0.95, 0.985, 0.80}},
      {{0.12, 0.40, 0.90, 0.87}, {0.15, 0.40, 0.90, 0.85}},
      {{0.03, 0.30, 0.90, 0.87}, {0.15, 0.40, 0.90, 0.85}},
  };

  int max_match_;
  bool learns_;
  std::vector<Chance> rows_[kKinds][2];
  Chance seconds_[kKinds];
};

// Corrects the shared estimates for one request, by the share of right tokens of its own streams.
class Standing {
 public:
  explicit Standing(bool learns) : learns_(learns) {}

  // Record whether a stream with this estimate was right.
  void observe(Kind kind, double chance, bool right) {
    if (!learns_ || kind == kFirst) return;
    Record& record = records_[kind];
    record.expected += chance;
    record.right += right;
    if (record.expected >= kMemory) {
      record.expected /= 2;
      record.right /= 2;
    }
    record.factor = (kWeight + record.right) / (kWeight + record.expected);
  }

  // The odds of an estimate, corrected for this request.
  double odds(Kind kind, double chance) const {
    const double sane = std::clamp(chance * records_[kind].factor, 0.001, 0.99);
    return sane / (1.0 - sane);
  }

 private:
  static constexpr double kWeight = 8.0;  // weight of the shared estimates in expected tokens
  static constexpr double kMemory = 64.0;

  struct Record {
    double expected = 0.0, right = 0.0, factor = 1.0;
  };

  bool learns_;
  std::array<Record, kKinds> records_;
};

}  // namespace qspec
