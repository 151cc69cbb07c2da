// The worker of the offloaded neurons, request_ by a thread as a device does; part of check_kernels. Built with
// -fsanitize=thread it shows whether both sides agree on who may read what and when.
#include "check_kernels.h"
#include "layout/repack.h"
#include "worker/cold_worker.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace sparsepack {
namespace {

int64_t parts(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// As runtime/hybrid/mailbox.py lays it out.
Mailbox layout_of(int32_t blocks, int32_t neurons, int32_t hidden, int32_t sequences) {
    Mailbox at = {blocks, neurons, hidden, sequences, 0, 0, 128, 0, 4, 128, 0, 0, 0, 0, 128, {}};
    at.gates = at.indices + parts(4 * neurons);
    at.x = at.gates + parts(4LL * sequences * neurons);
    at.request_size = at.x + parts(4LL * sequences * hidden);
    at.answers = at.requests + blocks * at.request_size;
    at.answer_size = at.y + parts(4LL * sequences * hidden);
    at.size = at.answers + blocks * at.answer_size;
    return at;
}

struct NeuronRequest {
    std::vector<int32_t> indices;
    std::vector<float> gates, x;  // [texts][neurons], [texts][hidden]
};

struct Case {
    Mailbox at;
    std::vector<NeuronMatrix> records;
    std::vector<const Neurons*> views;
    Buffer<uint8_t> memory;
};

Case random_case(const Mailbox& at) {
    static Pool pool(1);
    Case made = {at, {}, {}, Buffer<uint8_t>(at.size)};
    made.records.reserve(at.blocks);
    for (int32_t block = 0; block < at.blocks && at.neurons; block++) {
        std::vector<uint8_t> stored(size_t(at.neurons) * at.hidden / BAND_ROWS * 2 * sizeof(Q4KBlock));
        for (uint8_t& byte : stored) byte = (uint8_t)bits();
        for (size_t i = 0; i < stored.size(); i += sizeof(Q4KBlock)) {
            uint16_t scales[2] = {half(0.01f * normal()), half(0.01f * normal())};
            __builtin_memcpy(&stored[i], scales, 4);
        }
        made.records.push_back(repack_neurons(stored.data(), at.neurons, at.hidden / BAND_ROWS, pool));
    }
    for (const NeuronMatrix& matrix : made.records) made.views.push_back(&matrix.view);
    return made;
}

NeuronRequest random_request(const Mailbox& at, int32_t texts, int32_t active) {
    NeuronRequest request_ = {{}, std::vector<float>(size_t(texts) * at.neurons), normals(size_t(texts) * at.hidden)};
    for (int32_t text = 0; text < texts; text++)
        for (int32_t left = active; left > 0; left--) request_.gates[text * at.neurons + below(at.neurons)] = uniform();
    for (int32_t neuron = 0; neuron < at.neurons; neuron++) {
        bool any = false;
        for (int32_t text = 0; text < texts; text++) any |= request_.gates[text * at.neurons + neuron] != 0;
        if (any) request_.indices.push_back(neuron);
    }
    return request_;
}

// Writes the request of a block, and returns the answer when it is there; empty where the worker gave up.
std::vector<float> ask(Case& c, int32_t block, int32_t number, int32_t texts, const NeuronRequest& request_) {
    const Mailbox& at = c.at;
    uint8_t* request = c.memory.data() + at.requests + block * at.request_size;
    uint8_t* answer = c.memory.data() + at.answers + block * at.answer_size;
    int32_t count = (int32_t)request_.indices.size();
    for (int32_t i = 0; i < count; i++) {
        ((int32_t*)(request + at.indices))[i] = request_.indices[i];
        for (int32_t text = 0; text < texts; text++)
            ((float*)(request + at.gates))[text * at.neurons + i] =
                request_.gates[text * at.neurons + request_.indices[i]];
    }
    std::copy(request_.x.begin(), request_.x.end(), (float*)(request + at.x));
    __atomic_store_n((int32_t*)(request + at.count), count, __ATOMIC_RELAXED);
    __atomic_store_n((int32_t*)request, number, __ATOMIC_RELEASE);
    std::vector<float> y(size_t(texts) * at.hidden);
    if (!count) return y;
    while (__atomic_load_n((int32_t*)answer, __ATOMIC_ACQUIRE) != number) {
        if (__atomic_load_n((int32_t*)(c.memory.data() + at.abort), __ATOMIC_ACQUIRE)) return {};
        std::this_thread::yield();
    }
    const float* from = (const float*)(answer + at.y);
    std::copy(from, from + y.size(), y.begin());
    return y;
}

std::vector<float> expected(const Neurons& n, int32_t texts, const NeuronRequest& request_) {
    std::vector<float> y(size_t(texts) * neuron_hidden(&n));
    NeuronsWork work = {&n, (int32_t)n.count, nullptr, request_.x.data(), request_.gates.data(), texts, y.data()};
    scalar_kernels.neuron_matmul(&work);
    return y;
}

void check_answer(const std::vector<float>& found, const Neurons& n, int32_t texts, const NeuronRequest& request_,
                  const Kernels& k, const std::string& what) {
    double typical = 0;  // of all texts together
    for (int32_t text = 0; text < texts; text++)
        typical += std::pow(typical_norm(n, &request_.x[text * neuron_hidden(&n)], &request_.gates[text * n.count]), 2);
    check_near(found, expected(n, texts, request_), k.name, what, NORMWISE, NORMWISE * (float)std::sqrt(typical));
}

void check_steps(const Kernels& k, const Mailbox& at, int threads) {
    Case c = random_case(at);
    ColdWorker worker(k, c.views, at, c.memory.data(), threads, 60);
    for (int32_t number = 1; number < 6; number++) {
        int32_t texts = number % 2 ? at.sequences : 1;
        std::vector<NeuronRequest> request_;
        for (int32_t block = 0; block < at.blocks; block++) {
            int32_t actives[] = {0, 1, at.neurons / 3, 4 * at.neurons};
            request_.push_back(random_request(at, texts, actives[(block + number) % 4]));
        }
        std::vector<std::vector<float>> found(at.blocks);
        worker.begin(number, texts);
        std::thread device([&] {
            for (int32_t block = 0; block < at.blocks; block++)
                found[block] = ask(c, block, number, texts, request_[block]);
        });
        while (!worker.wait(number, 0.01)) continue;
        device.join();
        for (int32_t block = 0; block < at.blocks; block++)
            check_answer(found[block], *c.views[block], texts, request_[block], k,
                         text("worker of %d threads, %d texts, %d of %d neurons of %d channels", threads, texts,
                              (int)request_[block].indices.size(), at.neurons, at.hidden));
    }
}

// A product of each block, of all texts, before its neurons, of which there are none. skips: columns are left out whose
// input is zero, as about half of them; and the layout has no neurons.
void check_products(const Kernels& k, int64_t rows, int64_t columns, int32_t texts, int threads, bool skips) {
    static Pool pool(1);
    Mailbox at = layout_of(3, skips ? 0 : 32, 256, texts);
    std::vector<ZigzagMatrix> matrices;
    std::vector<const Zigzag*> views;
    for (int32_t block = 0; block < at.blocks; block++) {
        std::vector<uint8_t> stored((rows + 255) / 256 * columns * sizeof(Q4KBlock));
        for (uint8_t& byte : stored) byte = (uint8_t)bits();
        for (size_t i = 0; i < stored.size(); i += sizeof(Q4KBlock)) {
            uint16_t scales[2] = {half(0.01f * normal()), half(0.01f * normal())};
            __builtin_memcpy(&stored[i], scales, 4);
        }
        matrices.push_back(repack_zigzag(stored.data(), rows, columns, 1, 64, pool));
        int64_t x = at.size + 128, answer = x + parts(4 * texts * columns), y = answer + 128;
        at.products.push_back({block, int32_t(columns), int32_t(rows), skips, 0, at.size, x, answer, y, 0});
        at.size = y + parts(4 * texts * rows);
    }
    for (const ZigzagMatrix& matrix : matrices) views.push_back(&matrix.view);
    Case c = random_case(at);
    ColdWorker worker(k, skips ? std::vector<const Neurons*>{} : c.views, at, c.memory.data(), threads, 60, views);
    for (int32_t number = 1; number < 4; number++) {
        std::vector<std::vector<float>> x, found(at.blocks);
        for (int32_t block = 0; block < at.blocks; block++) {
            x.push_back(normals(texts * columns));
            for (float& value : x.back())
                if (skips && bits() % 2) value = 0;
        }
        worker.begin(number, texts);
        std::thread device([&] {
            for (int32_t block = 0; block < at.blocks; block++) {
                const MailboxProduct& request_ = at.products[block];
                uint8_t* memory = c.memory.data();
                std::copy(x[block].begin(), x[block].end(), (float*)(memory + request_.x));
                __atomic_store_n((int32_t*)(memory + request_.request), number, __ATOMIC_RELEASE);
                while (__atomic_load_n((int32_t*)(memory + request_.answer), __ATOMIC_ACQUIRE) != number)
                    std::this_thread::yield();
                const float* y = (const float*)(memory + request_.y);
                found[block].assign(y, y + texts * rows);
                if (!skips) ask(c, block, number, texts, random_request(at, texts, 0));
            }
        });
        while (!worker.wait(number, 0.01)) continue;
        device.join();
        for (int32_t block = 0; block < at.blocks; block++) {
            std::vector<float> expected(texts * rows);
            MatmulWork work = {views[block], 0,    int32_t(columns), nullptr, x[block].data(), nullptr, columns,
                               rows,         texts};
            for (work.quad = 0; work.quad < quads(views[block]); work.quad++) {
                work.y = expected.data();
                scalar_kernels.zigzag_matmul(&work);
            }
            check_near(found[block], expected, k.name,
                       text("worker of %d threads, rows %d of %d columns", threads, (int)rows, (int)columns));
        }
    }
}

// An end that comes at any moment ends both sides, and what comes next is right.
void check_interrupts(const Kernels& k) {
    Mailbox at = layout_of(6, 256, 256, 1);
    Case c = random_case(at);
    ColdWorker worker(k, c.views, at, c.memory.data(), 3, 60);
    for (int32_t number = 1; number < 30; number++) {
        std::vector<NeuronRequest> request_;
        for (int32_t block = 0; block < at.blocks; block++) request_.push_back(random_request(at, 1, 200));
        std::vector<float> last;
        worker.begin(number, 1);
        std::thread device([&] {
            for (int32_t block = 0; block < at.blocks; block++) {
                last = ask(c, block, number, 1, request_[block]);
                if (last.empty()) return;
            }
        });
        bool interrupted = number % 2, failed = false;
        if (interrupted) {
            std::this_thread::sleep_for(std::chrono::microseconds(below(200)));
            worker.interrupt();
        }
        try {
            while (!worker.wait(number, 0.01)) continue;
        } catch (const std::runtime_error&) {
            failed = true;
        }
        device.join();
        check(failed == interrupted, k.name, "an interrupted step");
        if (!interrupted) check_answer(last, *c.views.back(), 1, request_.back(), k, "a step after an interrupted one");
    }
}

void check_stop(const Kernels& k) {
    Mailbox at = layout_of(2, 64, 256, 1);
    Case c = random_case(at);
    for (int open = 0; open < 2; open++) {
        ColdWorker worker(k, c.views, at, c.memory.data(), 2, 60);
        if (open) worker.begin(1, 1);
        worker.stop();
        bool failed = false;
        try {
            worker.begin(2, 1);
        } catch (const std::runtime_error&) {
            failed = true;
        }
        check(failed, k.name, "a step of a worker that was stopped");
    }
}

}  // namespace

void check_cold_worker(const Kernels& k) {
    for (int threads : {1, 2, 5}) {
        check_steps(k, layout_of(5, 37, 256, 1), threads);
        check_steps(k, layout_of(5, 701, 512, 3), threads);
        check_steps(k, layout_of(4, 131, 1280, 8), threads);
        for (bool skips : {false, true}) {
            check_products(k, 1301, 512, 1, threads, skips);
            check_products(k, 2304, 300, 3, threads, skips);
        }
    }
    check_interrupts(k);
    check_stop(k);
}

}  // namespace sparsepack
