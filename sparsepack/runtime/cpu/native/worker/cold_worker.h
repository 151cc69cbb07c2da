// The processor's side of a mailbox (runtime/hybrid/mailbox.py draws the memory): threads that answer what a device
// asks of them, one request after the other: of each block the rows of its matrices, and then its neurons.
//
//     caller     begin(n)                                                   wait(n)
//     device       request 0, n ...... answer 0, n | request 1, n ...        |
//     thread 0     awaits, deals out | adds | answers                        |
//     others              compute ranges | add                               sleep after a while
//
// A step is one region of a pool. Thread 0 alone looks at what the device writes; the others learn from it how many
// threads a request is dealt to, by its bytes. Where a block has gates, its request lists neurons that may be active, and
// its gates are not read: whoever has a neuron computes its gate and leaves it out unless that is above zero. Of neurons
// each of these threads takes a contiguous range of the listed ones and
// leaves a vector of sums, and after all of them have, adds a range of the channels of all vectors, in the order of the
// threads. Of rows they take slices of the columns from a counter, and add slices in their order. So the same request
// gives the same bits with as many threads. Where a product skips columns, those whose input is zero are not read. A
// mailbox of no neurons asks for products alone.
#pragma once
#include "kernels/kernels.h"
#include "memory/buffer.h"
#include "threads/pool.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

namespace sparsepack {

// A product that is asked for before a block's neurons; whether columns whose input is zero are left out; where its
// request and its answer lie in the memory, and of a matrix of planes the level of each column, as bytes; 0: nowhere. Of its
// first span columns before `begins` are the device's.
struct MailboxProduct {
    int32_t block, columns, rows, skips, begins;
    int64_t request, x, answer, y, levels;
};

// The bytes at which the parts of a mailbox lie; those of a request or an answer count from where it begins, which is
// with its number.
struct Mailbox {
    int32_t blocks, neurons, hidden, sequences;
    int64_t size, abort;
    int64_t requests, request_size, count, indices, gates, x;
    int64_t answers, answer_size, y;
    std::vector<MailboxProduct> products;  // by block
};

// Why a side gave up, as the abort word says it: mailbox.py, Abort.
enum Abort { GOES_ON = 0, INTERRUPTED = 1, DEVICE_WAITED = 2, WORKER_WAITED = 3, BAD_REQUEST = 4 };

// The calls come from one thread, but for `stop`.
class ColdWorker {
public:
    // records: of each block, none where the layout has no neurons; products: the matrices of the layout's; gates: of
    // each block, null where requests have them, or none at all. They and the memory must outlive the worker.
    // limit: seconds that it waits for a request. Throws std::invalid_argument where sizes do not fit together,
    // std::system_error where threads do not start.
    ColdWorker(const Kernels& kernels, std::vector<const Neurons*> records, const Mailbox& layout, uint8_t* memory,
               int threads, double limit, std::vector<const Zigzag*> products = {},
               std::vector<const Gates*> gates = {});
    ~ColdWorker();

    // The device is about to ask for step `number`, of the first `sequences` sequences. Before it does, the step before has
    // ended on both sides; what the worker still awaits of it, it gives up. What was interrupted is forgotten. Throws
    // std::runtime_error where the worker failed or is gone, std::invalid_argument for sequences that have no room.
    void begin(int32_t number, int32_t sequences);

    // Whether step `number`, which began last, has ended, after at most so many seconds. Throws std::runtime_error if it
    // failed or the worker is gone, std::invalid_argument for another number.
    bool wait(int32_t number, double seconds);

    // Both sides give up the step; the next one may begin when the device has ended it.
    void interrupt() noexcept;

    // Ends the threads: both sides give up at once, and all that comes later is an error. From any thread.
    void stop() noexcept;

    int threads() const noexcept { return threads_; }
    // Since the beginning: neurons computed, and the seconds from their requests to their answers.
    int64_t neurons() const noexcept { return neurons_; }
    double seconds() const noexcept { return seconds_; }
    // The seconds from requests of products to their answers.
    double product_seconds() const noexcept { return product_seconds_; }

private:
    static constexpr int32_t SPARE_COLUMNS = 16;  // kernels may read as many indices beyond the last

    struct Leader;
    // What the device asks for: the neurons of a block, or a product's rows where `product` is none of -1.
    struct Request {
        int32_t block, product;
    };
    struct Deal {
        int32_t count, threads;
    };
    struct alignas(64) Arrivals {
        std::atomic<int32_t> taken{0}, computed{0}, added{0};
    };
    struct alignas(64) Own {
        Buffer<uint8_t> input;   // of each sequence
        Buffer<float> products;  // [sequences][neurons]: of gates
        Buffer<int32_t> active;  // of those that are listed
        Buffer<int32_t> kept;  // columns of two slices of a product that skips some or has levels, one after the other
        Buffer<float> seen;    // the input of such a slice
    };

    uint8_t* request(const Request& of) const noexcept {
        if (of.product >= 0) return memory_ + at_.products[of.product].request;
        return memory_ + at_.requests + of.block * at_.request_size;
    }
    uint8_t* answer(const Request& of) const noexcept {
        if (of.product >= 0) return memory_ + at_.products[of.product].answer;
        return memory_ + at_.answers + of.block * at_.answer_size;
    }
    int32_t* abort_word() const noexcept { return reinterpret_cast<int32_t*>(memory_ + at_.abort); }

    void lead(Leader& leader) noexcept;
    void step() noexcept;
    void part(int thread) noexcept;
    bool deal(int32_t number) noexcept;
    bool await_deal(int32_t number) noexcept;
    // answers.cpp
    void compute(const Request& of, const Deal& deal, int thread, float* y) noexcept;
    int32_t active_of(const Request& of, const int32_t* indices, int32_t count, const float* x, int thread) noexcept;
    void answer_together(int32_t number, int thread) noexcept;
    void multiply_together(int32_t number, int thread) noexcept;

    void arrive(Arrivals& at, const Deal& deal) noexcept;
    void publish(const Request& of) noexcept;
    void give_up(int32_t reason) noexcept;
    void raise() const;

    const Kernels& kernels_;
    std::vector<const Neurons*> records_;
    std::vector<const Zigzag*> products_;
    std::vector<const Gates*> of_gates_;  // of each block, or null
    Mailbox at_;
    uint8_t* memory_;
    int threads_;
    double limit_;
    bool crowded_;
    Pool pool_;
    Leader* leader_ = nullptr;
    long owner_;

    int32_t number_ = 0, sequences_ = 0;  // of the step
    std::vector<Request> requests_;       // in the order in which they come
    std::vector<Deal> deals_;             // of them
    std::vector<Arrivals> arrivals_;      // at them
    std::vector<Own> own_;                // of each thread
    Buffer<float> gates_;                 // [sequences][neurons], where listed
    Buffer<float> partial_sums_;          // [threads][sequences][hidden]
    Buffer<float> slices_;                // of a product: [sequences][slices][padded rows]
    std::vector<int32_t> columns_;        // 0, 1, .. up to the most of any product
    alignas(64) std::atomic<int32_t> dealt_{0};
    std::atomic<bool> given_up_{false}, leave_{false};
    std::atomic<int32_t> failed_{GOES_ON};
    int64_t neurons_ = 0;
    double seconds_ = 0, product_seconds_ = 0;
};

}  // namespace sparsepack
