/* Each rank says where it is, and hears from all others; see setup/test_mpi.sh.
 *
 *   .venv/bin/mpicc -o hello_mpi src/motley/provision/hello_mpi.c
 *   mpirun -np 5 --hostfile hosts.txt ./hello_mpi
 */
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int rank, size, heard = 0;
    long mine, sum;
    char host[256] = "";
    MPI_Request all;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    gethostname(host, sizeof host - 1);
    mine = rank + 1;
    MPI_Iallreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD, &all);
    /* MPI's own waiting never sleeps; who waits a minute for what hangs leaves others the cores. */
    while (MPI_Test(&all, &heard, MPI_STATUS_IGNORE), !heard)
        usleep(1000);
    if (sum != (long)size * (size + 1) / 2) {
        fprintf(stderr, "rank %d on %s: the sum of ranks is %ld\n", rank, host, sum);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    printf("hello from rank %d of %d on %s\n", rank, size, host);
    MPI_Finalize();
    return 0;
}
