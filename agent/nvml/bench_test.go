//go:build cgo && linux

package nvml

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/nvml/testlib"
)

// BenchmarkSample8 is one sample of eight GPUs with two processes each, through all decorators. At 1 Hz its CPU time per
// second is the sampler's share of a core (%core). The test library answers in about a microsecond: what a real driver's
// calls cost comes on top.
func BenchmarkSample8(b *testing.B) {
	var pairs []string
	for i := range 8 {
		pairs = append(pairs, fmt.Sprintf("gpu%d.compute", i), "500:1000 501:2000", fmt.Sprintf("gpu%d.util", i), "50")
	}
	s := testlib.NewScenario(b, pairs...)
	b.Setenv(testlib.Env, s.Path)
	_, src, err := gpu.Stack(New(Config{Library: testlib.Build(b), Now: time.Now}), gpu.StackConfig{
		Now: time.Now, OwnerOf: func(int) gpu.Owner { return gpu.Owner{Name: "python", Workspace: "w", Ours: true} },
	})
	if err != nil {
		b.Fatal(err)
	}
	if inv, err := src.Inventory(b.Context()); err != nil || len(inv.Devices) != 8 {
		b.Fatal(inv, err)
	}
	before := cpu(b)
	b.ReportAllocs()
	for b.Loop() {
		if samples, err := src.Sample(b.Context()); err != nil || len(samples) != 8 {
			b.Fatal(samples, err)
		}
	}
	perSample := (cpu(b) - before) / time.Duration(b.N)
	b.ReportMetric(float64(perSample.Microseconds()), "µs-cpu/sample")
	b.ReportMetric(100*perSample.Seconds(), "%core@1Hz")
}

func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
