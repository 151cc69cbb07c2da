// sparsepack.runtime.cpu._native.SlowPolicy, which runtime/hybrid/policy.py describes.
#include "placement/slow_policy.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <deque>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace sparsepack {
namespace {

template <class T, int dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Released = nb::gil_scoped_release;

nb::object array(std::vector<int32_t>&& values) {
    auto* kept = new std::vector<int32_t>(std::move(values));
    nb::capsule owner(kept, [](void* kept) noexcept { delete static_cast<std::vector<int32_t>*>(kept); });
    return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

// The policy, and the bits that it still reads.
class Policy {
public:
    Policy(Array<const float, 2> score, Array<const bool, 2> resident, Array<const int32_t, 2> ties, float decay,
           float gain, float margin, int32_t every, int32_t delay, int32_t most, int threads)
        : blocks_(score.shape(0)), row_bytes_((score.shape(1) + 7) / 8), delay_(delay) {
        for (size_t dimension = 0; dimension < 2; ++dimension)
            if (!score.shape(dimension) || resident.shape(dimension) != score.shape(dimension) ||
                ties.shape(dimension) != score.shape(dimension))
                throw std::invalid_argument("score, resident, ties: expected [blocks, neurons]");
        if (threads < 1) throw std::invalid_argument("threads: expected at least 1");
        if (score.size() > size_t(INT32_MAX) || every < 1 || every > 255 || delay < 0 || delay >= every)
            throw std::invalid_argument("expected 1 to 255 tokens between decisions, and a delay below them");
        if (most < 1) throw std::invalid_argument("most: expected at least 1");
        SlowSettings settings = {int32_t(blocks_), int32_t(score.shape(1)), decay, gain, margin, every, delay, most};
        policy_ = std::make_unique<SlowPolicy>(settings, score.data(), resident.data(), ties.data(), threads);
    }

    ~Policy() {
        if (!policy_->is_here()) policy_.release();
    }

    void restart() {
        Released release;
        policy_->restart();
    }

    void saw(Array<const uint8_t, 3> bits, int64_t prompt) {
        if (bits.shape(1) != blocks_ || bits.shape(2) < row_bytes_)
            throw std::invalid_argument("bits: expected [tokens, blocks, bytes of the neurons or more]");
        while (held_.size() > policy_->waiting()) held_.pop_front();
        held_.push_back(bits);
        Released release;
        const auto& kept = held_.back();
        policy_->saw(kept.data(), int64_t(kept.shape(2)), int64_t(kept.shape(0)), prompt);
    }

    nb::object moves(int64_t unseen) {
        if (unseen < 0 || unseen > delay_) throw std::invalid_argument("unseen: expected at most the delay");
        std::pair<Moves, bool> found;
        {
            Released release;
            found = policy_->moves(unseen);
        }
        return found.second ? told_ : arrays(std::move(found.first));
    }

    nb::object ahead() {
        Moves found = policy_->ahead();
        if (found.coming.empty()) return nb::none();
        told_ = arrays(std::move(found));
        return told_;
    }

    nb::tuple counts() {
        SlowCounts found;
        {
            Released release;
            found = policy_->counts();
        }
        return nb::make_tuple(found.tokens, found.needed, found.hits, found.moves, found.unused);
    }

private:
    static nb::object arrays(Moves&& found) {
        if (found.coming.empty() && found.going.empty()) return nb::none();
        return nb::make_tuple(array(std::move(found.coming)), array(std::move(found.going)));
    }

    size_t blocks_, row_bytes_;
    int32_t delay_;
    std::deque<Array<const uint8_t, 3>> held_;
    nb::object told_;                     // what `ahead` said last
    std::unique_ptr<SlowPolicy> policy_;  // ends before what it reads
};

}  // namespace

void bind_placement(nb::module_& m) {
    nb::class_<Policy>(m, "SlowPolicy")
        .def(nb::init<Array<const float, 2>, Array<const bool, 2>, Array<const int32_t, 2>, float, float, float,
                      int32_t, int32_t, int32_t, int>(),
             "score"_a, "resident"_a, "ties"_a, "decay"_a, "gain"_a, "margin"_a, "every"_a, "delay"_a, "most"_a,
             "threads"_a = 1)
        .def_prop_ro_static("room", [](nb::handle) { return SlowPolicy::ROOM; })
        .def("restart", &Policy::restart)
        .def("saw", &Policy::saw, "bits"_a, "prompt"_a)
        .def("moves", &Policy::moves, "unseen"_a = 0)
        .def("ahead", &Policy::ahead)
        .def("counts", &Policy::counts);
}

}  // namespace sparsepack
