// Stacks of their own for fibres, on x86-64 and on arm64: those of kernels that this processor runs.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

// Save the registers that a function must keep, on this stack, and go on with another one.
extern "C" void switch_stack(void** save, void* to) __asm__("emulation_switch_stack");
#if defined(__x86_64__)
__asm__(
    ".text\n .p2align 4\n emulation_switch_stack:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
void* new_stack(char* top, void (*entry)()) {
    uint64_t* sp = (uint64_t*)top - 2;  // a function begins 8 bytes off a multiple of 16
    *sp = (uint64_t)entry;
    sp -= 6;
    memset(sp, 0, 6 * 8);
    return sp;
}
#elif defined(__aarch64__)
__asm__(
    ".text\n .p2align 4\n emulation_switch_stack:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n ret\n");
void* new_stack(char* top, void (*entry)()) {
    uint64_t* sp = (uint64_t*)top - 20;
    memset(sp, 0, 160);
    sp[11] = (uint64_t)entry;  // x30
    return sp;
}
#else
#error "fibres are written for x86-64 and arm64"
#endif

}  // namespace
