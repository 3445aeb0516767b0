//go:build cgo && linux

package nvml

import (
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/gpu/gputest"
)

// mockServer is one of go-nvml's servers with what they leave unset, which would panic.
func mockServer(configs ...gpus.Config) *server.Server {
	s := server.NewServerWithGPUs("550.54.15", "12.550.54.15", 12040, configs...)
	s.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED }
	for _, d := range s.Devices {
		device, ok := d.(*server.Device)
		if !ok {
			panic("the mock server's devices are of another type")
		}
		device.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return nvml.ERROR_NOT_SUPPORTED }
		device.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS }
		device.GetGraphicsRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS }
		device.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{Gpu: 12}, nvml.SUCCESS }
		device.GetPowerUsageFunc = func() (uint32, nvml.Return) { return 61_500, nvml.SUCCESS }
		device.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 41, nvml.SUCCESS }
	}
	return s
}

func mockSource(configs ...gpus.Config) gpu.Source {
	cfg := Config{Now: time.Now}.withDefaults()
	lib := mockServer(configs...)
	return gpu.Isolate(newDriver(cfg, func() (*session, error) { return newSession(lib) }), gpu.IsolateConfig{Now: cfg.Now})
}

func TestContractMocks(t *testing.T) {
	for name, configs := range map[string][]gpus.Config{
		"dgx a100": gpus.Multiple(8, gpus.A100_SXM4_40GB),
		"dgx h100": gpus.Multiple(8, gpus.H100_SXM5_80GB),
		"mixed":    {gpus.A100_PCIE_80GB, gpus.A30_PCIE_24GB, gpus.H100_SXM5_80GB},
	} {
		t.Run(name, func(t *testing.T) {
			gputest.Contract(t, func(*testing.T) gpu.Source { return mockSource(configs...) })
		})
	}
}

func TestMockModels(t *testing.T) {
	inv := inventoryOf(t, mockSource(gpus.A100_SXM4_40GB, gpus.A100_PCIE_80GB, gpus.A30_PCIE_24GB, gpus.H100_SXM5_80GB))
	want := []string{"A100-40GB", "A100-80GB", "A30", "H100"}
	for i, d := range inv.Devices {
		if d.ModelKey != want[i] {
			t.Errorf("%s is %q, want %q", d.Model, d.ModelKey, want[i])
		}
	}
}
