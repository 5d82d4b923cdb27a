// How much one matching stream speaks for its next token. This is the whole policy on trust.
//
// The odds are those that the stream's next token is the target's, by whose stream it is, whether
// it is followed or found, and how many tokens of it matched: for one stream alone, odds /
// (odds + 1) is the chance. A stream that is followed from its base was drafted from the very text
// that is committed; one that was found by its last tokens only resembles it.
//
// The chances begin as they were counted on recorded completions of SmolLM2-135M-Instruct (int8
// drafts, sampled at temperature 0.6, six kinds of prompts) and are learnt from then on: every
// committed token tells of every stream that was matched there whether it was right. Each chance
// is the mean of its beta posterior, whose counts are halved now and then so that it follows a
// change of load. One request's streams of a kind may be worth much less (or more) than all others',
// as when a client guesses wrong: what is made of their chances is learnt for each request by itself.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace qspec {

// Whose token it is: `Source` in Python, with the same numbers.
enum Source : std::uint8_t { kQueue = 0, kGuess = 1, kPrompt = 2, kOutput = 3, kStep = 4, kSources = 5 };

// What the trust depends on besides the match: a source, with greedy queue drafts apart.
enum Kind : std::uint8_t { kGreedy = 0, kSampled, kGuessed, kStepped, kOfPrompt, kOfOutput, kKinds };

constexpr std::array<Source, kKinds> kSourceOf = {kQueue, kQueue, kGuess,
                                                  kStep,  kPrompt, kOutput};

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
    }
  }

  int max_match() const { return max_match_; }
  bool learns() const { return learns_; }

  // `length` >= 1 tokens matched, the token before a followed stream's first one included.
  double chance(Kind kind, bool followed, int length) const {
    return rows_[kind][followed][length].mean;
  }

  // Whether the next token of a stream which matched like this was the target's.
  void observe(Kind kind, bool followed, int length, bool right) {
    if (!learns_) return;
    Chance& chance = rows_[kind][followed][length];
    chance.right += right;
    chance.seen += 1.0;
    if (chance.seen >= kMemory) {
      chance.right /= 2;
      chance.seen /= 2;
    }
    const double mean = (kPriorWeight * chance.prior + chance.right) / (kPriorWeight + chance.seen);
    chance.mean = std::clamp(mean, 0.01, 0.99);
  }

 private:
  static constexpr double kPriorWeight = 32.0;  // observations that the first chance is worth
  static constexpr double kMemory = 2048.0;

  struct Prior {
    double first;   // at length 1
    double second;  // at length 2, and from there towards `most`
    double most;
    double pace;  // what remains of the distance to `most` after each further token

    double chance(int length) const {
      return length < 2 ? first : most - (most - second) * std::pow(pace, length - 2);
    }
  };

  struct Chance {
    double prior, right, seen, mean;
  };

  // By kind: found, followed. Own text is never followed.
  static constexpr Prior kPriors[kKinds][2] = {
      {{0.28, 0.60, 0.90, 0.87}, {0.85, 0.93, 0.985, 0.80}},
      {{0.18, 0.48, 0.86, 0.87}, {0.58, 0.70, 0.91, 0.80}},
      {{0.25, 0.55, 0.95, 0.80}, {0.40, 0.65, 0.95, 0.75}},
      {{0.28, 0.60, 0.90, 0.87}, {0.90, 0.95, 0.985, 0.80}},
      {{0.12, 0.45, 0.93, 0.85}, {0.12, 0.45, 0.93, 0.85}},
      {{0.20, 0.52, 0.95, 0.87}, {0.20, 0.52, 0.95, 0.87}},
  };

  int max_match_;
  bool learns_;
  std::vector<Chance> rows_[kKinds][2];
};

// How one request's streams do against what all requests have taught of their kinds.
class Standing {
 public:
  explicit Standing(bool learns) : learns_(learns) {}

  // A stream whose next token had this chance was right or not.
  void observe(Kind kind, double chance, bool right) {
    if (!learns_) return;
    Record& record = records_[kind];
    record.expected += chance;
    record.right += right;
    if (record.expected >= kMemory) {
      record.expected /= 2;
      record.right /= 2;
    }
    record.factor = (kWeight + record.right) / (kWeight + record.expected);
  }

  // The odds of a chance in this request.
  double odds(Kind kind, double chance) const {
    const double sane = std::clamp(chance * records_[kind].factor, 0.001, 0.99);
    return sane / (1.0 - sane);
  }

 private:
  static constexpr double kWeight = 8.0;  // expected tokens that the common chances are worth
  static constexpr double kMemory = 64.0;

  struct Record {
    double expected = 0.0, right = 0.0, factor = 1.0;
  };

  bool learns_;
  std::array<Record, kKinds> records_;
};

}  // namespace qspec
