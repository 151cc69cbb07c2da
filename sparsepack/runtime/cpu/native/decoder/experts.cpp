// MLPs that are mixtures of experts: who is chosen, and what these add. The products of all experts of a token are shared
// out together, so that a token has as many barriers as with a dense MLP, and one for the router.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "decoder/decoder.h"

namespace sparsepack {

// The experts of a token by the router's logits, the likeliest first, and their weights; after them the shared ones.
void Decoder::choose(const Experts& e, const float* logits, int32_t* chosen, float* weights, int thread) {
    auto logit = [&](int32_t i) { return e.router_bias.empty() ? logits[i] : logits[i] + e.router_bias[i]; };
    float largest = logit(0), sum = 0, of_chosen = 0;
    for (int32_t i = 1; i < e.count(); ++i) largest = std::max(largest, logit(i));
    for (int32_t i = 0; i < e.count(); ++i) sum += expf(logit(i) - largest);
    float* scores = scratch_[thread].scores.data();
    for (int32_t i = 0; e.routing && i < e.count(); ++i)
        scores[i] = e.routing->sigmoid ? 1 / (1 + expf(-logit(i))) : expf(logit(i) - largest) / sum;
    if (e.routing) choose_by_scores(e, scores, chosen, weights);
    for (int32_t slot = 0; slot < e.used && !e.routing; ++slot) {
        int32_t best = -1;
        for (int32_t i = 0; i < e.count(); ++i) {
            if (best >= 0 && !(logit(i) > logit(best))) continue;
            if (std::find(chosen, chosen + slot, i) == chosen + slot) best = i;
        }
        chosen[slot] = best;
        weights[slot] = expf(logit(best) - largest) / sum;
        of_chosen += weights[slot];
    }
    for (int32_t slot = 0; slot < e.used && e.routing; ++slot) of_chosen += weights[slot];
    for (int32_t slot = 0; slot < e.used && e.normalised; ++slot) weights[slot] /= of_chosen;
    for (int32_t slot = 0; slot < e.used && e.routing; ++slot) weights[slot] *= e.routing->scale;
    for (int32_t slot = 0; slot < e.used && !e.scale.empty(); ++slot) weights[slot] *= e.scale[chosen[slot]];
    for (int32_t i = 0; i < e.shared; ++i) {
        chosen[e.used + i] = e.count() + i;
        weights[e.used + i] = e.shared_gated ? 1 / (1 + expf(-logits[e.count()])) : 1;
    }
}

// The experts with the best scores [count], their bias included, in the best groups; the scores of these are their weights.
void Decoder::choose_by_scores(const Experts& e, float* scores, int32_t* chosen, float* weights) {
    const Routing& how = *e.routing;
    const int32_t size = e.count() / how.groups;
    auto by = [&](int32_t i) { return how.correction.empty() ? scores[i] : scores[i] + how.correction[i]; };
    auto of_group = [&](int32_t group) {
        float first = -INFINITY, second = -INFINITY;
        for (int32_t i = group * size; i < (group + 1) * size; ++i) {
            float score = by(i);
            if (score > first)
                second = first, first = score;
            else if (score > second)
                second = score;
        }
        return how.sigmoid ? first + second : first;
    };
    uint64_t stays[MOST_GROUPS / 64] = {};
    auto in = [&](int32_t group) { return stays[group / 64] >> group % 64 & 1; };
    for (int32_t n = 0; n < how.groups_used; ++n) {
        int32_t best = -1;
        float score = 0;
        for (int32_t group = 0; group < how.groups; ++group) {
            if (in(group)) continue;
            float found = how.groups > how.groups_used ? of_group(group) : 0;
            if (best < 0 || found > score) best = group, score = found;
        }
        stays[best / 64] |= uint64_t(1) << best % 64;
    }
    for (int32_t slot = 0; slot < e.used; ++slot) {
        int32_t best = -1;
        for (int32_t i = 0; i < e.count(); ++i) {
            if (!in(i / size) || (best >= 0 && !(by(i) > by(best)))) continue;
            if (std::find(chosen, chosen + slot, i) == chosen + slot) best = i;
        }
        chosen[slot] = best;
        weights[slot] = scores[best];
    }
}

// From the input x [hidden] of the MLP, for the sequence of this number in the step, to what the experts add. The slices of
// all experts are one sum: what enters mlp_mid is multiplied by the expert's weight. read: the units of mlp_in and of mlp_mid
// that were read (`units_read`), of all experts of the token.
Decoder::Sums Decoder::experts(const float* x, int layer, bool sparse, int32_t index, int thread, int64_t read[2]) {
    const Layer& of = model_.layers[layer];
    const Experts& e = *of.experts;
    const Site &in = of.sites[MLP_IN], &mid = of.sites[MLP_MID];
    Scratch& own = scratch_[thread];
    const int32_t n = of.width, used = e.of_token();

    share_matmul(k_, pool_, *e.router, x, 1, routed_.data());
    pool_.barrier();
    choose(e, routed_.data(), own.chosen.data(), own.weights.data(), thread);

    Active active = {all_.data(), s_.hidden};
    if (sparse && in.has_levels()) {
        active = list_levels(in, x, in.threshold.data(), index, own.d.data(), own.indices.data(), thread);
        x = own.d.data();
        if (thread == 0) count_unread(in, s_.hidden, bytes_read(active), index, thread, used);
    } else if (sparse && !in.threshold.empty()) {
        const float* threshold = thresholds(in, 0, s_.hidden, index, thread);
        active.count =
            k_.collect(x, nullptr, threshold, in.threshold.size() > 1, s_.hidden, 0, own.d.data(), own.indices.data());
        active.indices = own.indices.data();
        x = own.d.data();
        if (thread == 0) count_skipped(in, int64_t(used) * (s_.hidden - active.count), index, thread);
    }
    for (int32_t slot = 0; slot < used; ++slot) own.products[slot] = {&e.in[own.chosen[slot]], x, active};
    float *both = partial_sums_[MLP_IN & 1].data(), *sums = partial_sums_[MLP_MID & 1].data();
    share_gemvs(k_, pool_, own.products.data(), used, both);
    pool_.barrier();

    const int32_t slices = gemv_slices(*in.matrix, active.count, pool_.threads(), used);
    const int64_t stride = gemv_stride(*in.matrix), rows = in.matrix->rows;  // without gates n, which stand for both
    const bool skips = sparse && !mid.threshold.empty();
    pool_.share(used, [&](int slot, int) {
        const float* of_slot = both + slot * slices * stride;
        float *y = middle_.data() + int64_t(slot) * n, *up = own.d.data();
        const float* bias = e.in_bias.empty() ? nullptr : e.in_bias.data() + own.chosen[slot] * rows;
        k_.sum(of_slot, stride, slices, bias, n, 0, y);
        k_.sum(of_slot + rows - n, stride, slices, bias ? bias + rows - n : nullptr, n, 0, up);
        k_.gate(s_.activation, y, up, n, y);
        Active found = {all_.data(), n};
        int32_t* listed = expert_lists_.data() + slot * (int64_t(n) + 16);
        if (skips && mid.has_levels()) {
            const float* threshold = mid.threshold.data() + int64_t(own.chosen[slot]) * n;
            found = list_levels(mid, y, threshold, index, y, listed, thread);
            count_unread(mid, n, bytes_read(found), index, thread);
        } else if (skips) {
            const float* threshold = thresholds(mid, 0, n, index, thread);
            int32_t count = k_.collect(y, nullptr, threshold, mid.threshold.size() > 1, n, 0, y, listed);
            found = {listed, count};
            count_skipped(mid, n - count, index, thread);
        }
        for (int32_t i = 0; i < n; ++i) y[i] *= own.weights[slot];
        expert_active_[slot].active = found;
    });
    pool_.barrier();

    int32_t all_slices = 0, of_chosen = 0;
    read[0] = used * units_read(in, active), read[1] = 0;
    for (int32_t slot = 0; slot < used; ++slot) {
        const Active& found = expert_active_[slot].active;
        own.products[slot] = {&e.mid[own.chosen[slot]], middle_.data() + int64_t(slot) * n, found};
        int32_t more = gemv_slices(*mid.matrix, found.count, pool_.threads(), used);
        all_slices += more;
        if (slot < e.used) of_chosen += more;
        read[1] += units_read(mid, found);
    }
    share_gemvs(k_, pool_, own.products.data(), used, sums);
    pool_.barrier();
    own.bias.assign(e.mid_bias.empty() ? 0 : s_.hidden, 0);
    for (int32_t slot = 0; slot < used && !e.mid_bias.empty(); ++slot)
        add_bias(e, own.chosen[slot], own.weights[slot], own.bias.data());
    const int64_t row = gemv_stride(*mid.matrix);
    if (e.norm.empty()) return {sums, row, all_slices, &own.bias, s_.hidden};
    int64_t first = int64_t(s_.hidden) * thread / pool_.threads();
    int32_t count = int32_t(int64_t(s_.hidden) * (thread + 1) / pool_.threads() - first);
    float* both_sums = expert_sums_.data();
    k_.sum(sums + first, row, of_chosen, nullptr, count, 0, both_sums + first);
    k_.sum(sums + of_chosen * row + first, row, all_slices - of_chosen, nullptr, count, 0,
           both_sums + s_.hidden + first);
    pool_.barrier();
    float* made = own.made.data();
    norm_experts(e, both_sums, both_sums + s_.hidden, made + s_.hidden, made);
    return {made, 0, 1, &own.bias, s_.hidden};
}

// y[hidden] = norm(what the chosen experts make) + norm(what the shared ones make); scratch [hidden]
void Decoder::norm_experts(const Experts& e, const float* of_chosen, const float* of_shared, float* scratch,
                           float* y) const {
    k_.rms_norm(of_chosen, e.norm.data(), s_.hidden, s_.eps, y);
    k_.rms_norm(of_shared, e.shared_norm.data(), s_.hidden, s_.eps, scratch);
    k_.sum(scratch, 0, 1, nullptr, s_.hidden, 1, y);
}

// x[hidden] += what these make, normed; scratch [2][hidden]
void Decoder::add_experts(int layer, const float* of_chosen, const float* of_shared, float* scratch, float* x) const {
    const std::vector<float>& after = model_.layers[layer].mlp_post_norm;
    norm_experts(*model_.layers[layer].experts, of_chosen, of_shared, scratch + s_.hidden, scratch);
    if (!after.empty()) k_.rms_norm(scratch, after.data(), s_.hidden, s_.eps, scratch);
    k_.sum(scratch, 0, 1, nullptr, s_.hidden, 1, x);
}

// y[hidden] += weight times what the expert's mlp_mid has beside its product
void Decoder::add_bias(const Experts& e, int32_t expert, float weight, float* y) const {
    const float* bias = e.mid_bias.data() + int64_t(expert) * s_.hidden;
    for (int32_t i = 0; i < s_.hidden; ++i) y[i] += weight * bias[i];
}

// What the experts add to each of several sequences, one after the other: each sequence has experts of its own. Counted is the
// mean over the sequences.
void Decoder::experts_batch(int layer, int32_t batch, bool sparse, int thread) {
    int32_t first = batch * thread / pool_.threads(), last = batch * (thread + 1) / pool_.threads();
    int64_t all[2] = {0, 0}, counts[2];
    const std::vector<float>& after = model_.layers[layer].mlp_post_norm;
    for (int32_t t = 0; t < batch; ++t) {
        Sums sums = experts(wide_normed_.data() + int64_t(t) * s_.hidden, layer, sparse, t, thread, counts);
        float *x = wide_x_.data() + int64_t(t) * s_.hidden, *own = scratch_[thread].d.data();
        if (first <= t && t < last && after.empty()) read(sums, 0, s_.hidden, x, true);
        if (first <= t && t < last && !after.empty()) {
            read(sums, 0, s_.hidden, own);
            k_.rms_norm(own, after.data(), s_.hidden, s_.eps, own);
            k_.sum(own, 0, 1, nullptr, s_.hidden, 1, x);
        }
        for (int site : {0, 1}) all[site] += counts[site];
    }
    for (int site : {0, 1})
        if (thread == 0) active_[layer * SITES + MLP_IN + site] += all[site] / batch;
}

// The same for positions that are prefilled together, of which this thread has first ... last - 1: expert by expert, the
// positions that have it side by side.
void Decoder::expert_rows(int layer, int32_t first, int32_t last, int32_t positions, int thread) {
    const Experts& e = *model_.layers[layer].experts;
    const Site &in = model_.layers[layer].sites[MLP_IN], &mid = model_.layers[layer].sites[MLP_MID];
    const int64_t hidden = s_.hidden, n = model_.layers[layer].width, into = e.in->rows;
    const int32_t used = e.of_token(), stored = e.stored();
    const uint8_t* in_levels = levels(in) ? expert_levels_.data() : nullptr;
    uint8_t* mid_levels = levels(mid) ? expert_levels_.data() : nullptr;
    int64_t& mid_counted = scratch_[thread].counted[layer * SITES + MLP_MID];
    const bool normed = !e.norm.empty();
    float* sums[2] = {wide_experts_.data(), wide_experts_.data() + positions * hidden};
    for (float* of : sums)
        if (normed) memset(of + first * hidden, 0, (last - first) * hidden * sizeof(float));
    int32_t *chosen = wide_chosen_.data(), *starts = starts_.data(), *placed = placed_.data();
    float *inner = wide_inner_.data(), *rows = wide_rows_.data();

    share_matmul(k_, pool_, *e.router, wide_normed_.data(), positions, routed_.data());
    pool_.barrier();
    for (int64_t p = first; p < last; ++p)
        choose(e, routed_.data() + p * e.router->rows, chosen + p * used, wide_weights_.data() + p * used, thread);
    mask_rows(layer, MLP_IN, wide_normed_.data(), first, last, thread, used);
    pool_.barrier();
    if (thread == 0) {
        int32_t places = positions * used;
        std::fill(starts, starts + stored + 1, 0);
        for (int32_t i = 0; i < places; ++i) ++starts[chosen[i] + 1];
        for (int32_t i = 0; i < stored; ++i) starts[i + 1] += starts[i];
        for (int32_t i = 0; i < places; ++i) placed[starts[chosen[i]]++] = i;
        for (int32_t i = stored; i > 0; --i) starts[i] = starts[i - 1];  // each was moved to the next one's
        starts[0] = 0;
    }
    pool_.barrier();
    for (int32_t expert = 0; expert < stored; ++expert) {
        const int32_t *here = placed + starts[expert], count = starts[expert + 1] - starts[expert];
        if (!count) continue;
        int32_t from = int32_t(int64_t(count) * thread / pool_.threads());
        int32_t to = int32_t(int64_t(count) * (thread + 1) / pool_.threads());
        for (int32_t i = from; i < to; ++i) {
            memcpy(inner + i * hidden, wide_normed_.data() + here[i] / used * hidden, hidden * sizeof(float));
            if (in_levels) memcpy(expert_levels_.data() + i * hidden, levels(in, here[i] / used), hidden);
        }
        pool_.barrier();
        share_matmul(k_, pool_, e.in[expert], inner, count, rows, in_levels);
        pool_.barrier();
        for (int32_t i = from; i < to; ++i) {
            float *gate = rows + i * into, *y = inner + i * n;
            const float* bias = e.in_bias.empty() ? nullptr : e.in_bias.data() + expert * into;
            if (bias) k_.sum(bias, 0, 1, nullptr, int32_t(into), 1, gate);
            k_.gate(s_.activation, gate, gate + into - n, int32_t(n), y);
            if (steps_some_) {
                const float* threshold = mid.threshold.data() + (mid.has_levels() ? expert * n : 0);
                uint8_t* own = mid_levels ? mid_levels + i * n : nullptr;
                mid_counted += mask_row(mid, threshold, here[i] / used, y, own, thread);
            }
            for (int64_t j = 0; j < n; ++j) y[j] *= wide_weights_.data()[here[i]];
        }
        pool_.barrier();
        share_matmul(k_, pool_, e.mid[expert], inner, count, rows, mid_levels);
        pool_.barrier();
        for (int32_t i = from; i < to; ++i) {
            if (!e.mid_bias.empty()) add_bias(e, expert, wide_weights_.data()[here[i]], rows + i * hidden);
            float* to = normed ? sums[expert >= e.count()] : wide_x_.data();
            k_.sum(rows + i * hidden, 0, 1, nullptr, s_.hidden, 1, to + here[i] / used * hidden);
        }
        pool_.barrier();
    }
    for (int64_t p = first; p < last && normed; ++p)
        add_experts(layer, sums[0] + p * hidden, sums[1] + p * hidden, scratch_[thread].made.data(),
                    wide_x_.data() + p * hidden);
}

}  // namespace sparsepack
