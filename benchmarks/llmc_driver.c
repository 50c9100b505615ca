// Trains llm.c's GPT-2 on ids from stdin, B x T inputs then as many targets a step, and logs in the form of llm.c.
// Built in the user's checkout, whose train_gpt2.c leaves out its own main when TESTING is defined.
#define TESTING
#include "train_gpt2.c"

int main(int argc, char *argv[]) {
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    int B = atoi(argv[2]), T = atoi(argv[3]);
    float lr = atof(argv[4]), beta1 = atof(argv[5]), beta2 = atof(argv[6]), eps = atof(argv[7]), decay = atof(argv[8]);
    printf("loaded\n");
    fflush(stdout);
    size_t count = (size_t)B * T;
    int *ids = mallocCheck(2 * count * sizeof(int));
    for (int step = 1; fread(ids, sizeof(int), 2 * count, stdin) == 2 * count; step++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        gpt2_forward(&model, ids, ids + count, B, T);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, lr, beta1, beta2, eps, decay, step);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double seconds = (end.tv_sec - start.tv_sec) + (end.tv_nsec - start.tv_nsec) / 1e9;
        printf("step %d: train loss %f (took %f ms)\n", step, model.mean_loss, seconds * 1000);
        fflush(stdout);
    }
    free(ids);
    gpt2_free(&model);
    return 0;
}
