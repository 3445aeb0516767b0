package scheduler

import (
	"fmt"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// largeSnapshot is row 9 of the performance targets: 625 hosts of 8 devices in 4 models, 10,000 waiting runs of 500 users.
func largeSnapshot(hosts, waiting int) fleet.Snapshot {
	var s fleet.Snapshot
	s.Held = map[fleet.UserID]int{}
	models := []string{"4090", "A100-80GB", "H100", "L40S"}
	for i := range hosts {
		h := fleet.HostView{
			ID: fleet.HostID(fmt.Sprintf("h%04d", i)), Name: fmt.Sprintf("gpu%04d", i), Pool: "default", Usable: true, CPUMillis: 128000, MemoryMiB: 1040000,
			CPUOnlyReserve: 2000, MemOnlyReserve: 20000, FreeCPUMillis: 128000, FreeMemoryMiB: 1040000, FreeCPUOnly: 2000, FreeMemoryOnly: 20000, LeasableDevices: 8,
			CUDAVersion: "12.8", DriverVersion: "570.86.15", GPUSource: "nvml",
		}
		for d := range 8 {
			h.Devices = append(h.Devices, fleet.DeviceView{
				ID: fleet.DeviceID(fmt.Sprintf("GPU-%04d-%d", i, d)), Model: models[i%4], MemoryMiB: int64(24000 + 8000*(i%4)), ComputeCapability: "8.9", Leasable: true, Free: true,
			})
		}
		s.Hosts = append(s.Hosts, h)
	}
	for i := range waiting {
		user := fmt.Sprintf("user%03d", (i*7)%500)
		s.Waiting = append(s.Waiting, fleet.Request{
			Run: fleet.RunKey{Workspace: fleet.WorkspaceID(fmt.Sprintf("w%05d", i)), Epoch: 1}, Name: fmt.Sprintf("ws%d", i), User: fleet.UserID(user), UserName: user, GPULimit: 64,
			SubmittedAt: epoch.Add(time.Duration(i) * time.Millisecond),
			Spec:        fleet.Spec{Pool: "default", Image: "torch", GPU: fleet.GPURequest{Count: 1 + (i*i)%8, Models: models[i%4 : i%4+1]}, RequireCUDA: "cuda>=12.4"},
		})
	}
	return s
}

func BenchmarkPlan625x8With10000Waiting(b *testing.B) {
	s := largeSnapshot(625, 10000)
	for _, at := range []struct {
		name string
		now  time.Time
	}{{"fresh", epoch.Add(time.Minute)}, {"reserving", epoch.Add(time.Hour)}} {
		b.Run(at.name, func(b *testing.B) {
			placed := 0
			for b.Loop() {
				placed = len(Plan(s, Settings{}, at.now).Placements)
			}
			b.ReportMetric(float64(placed), "placed")
			b.ReportMetric(float64(len(s.Waiting))*float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
		})
	}
}
