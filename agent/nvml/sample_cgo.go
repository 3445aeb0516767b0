//go:build cgo && linux

package nvml

import (
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// Sample implements gpu.Driver.
//
// Utilisation is nvmlDeviceGetUtilizationRates: the share of the driver's last sample period, 1/6 to 1 s by product, in
// which a kernel ran. NVML has it for no GPU in MIG mode nor its instances: there it is not supported.
func (d *driver) Sample(uuid string) ([]gpu.Sample, error) {
	s, err := d.acquire()
	if err != nil {
		return nil, err
	}
	defer d.release()
	d.mu.Lock()
	m := d.gpus[uuid]
	var instances []instance
	if m != nil {
		instances = slices.Clone(m.instances)
	}
	d.mu.Unlock()
	if m == nil {
		return nil, fmt.Errorf("GPU %s is not in the inventory", uuid)
	}
	samples := []gpu.Sample{d.sample(s, m.device, uuid)}
	for _, i := range instances {
		samples = append(samples, d.sample(s, i.device, i.uuid))
	}
	return samples, nil
}

func (d *driver) sample(s *session, h nvml.Device, uuid string) gpu.Sample {
	now := d.cfg.Now()
	out := gpu.Sample{
		UUID: uuid, At: now,
		UtilisationPct: gpu.UnsupportedMetric(), MemoryUsedMiB: gpu.UnsupportedMetric(), PowerW: gpu.UnsupportedMetric(),
		TemperatureC: gpu.UnsupportedMetric(),
	}
	if s.has["nvmlDeviceGetUtilizationRates"] {
		u, ret := h.GetUtilizationRates()
		out.UtilisationPct = d.metric(float64(u.Gpu), ret, now)
	}
	if s.has["nvmlDeviceGetMemoryInfo"] {
		memory, ret := h.GetMemoryInfo()
		out.MemoryUsedMiB = d.metric(float64(mib(memory.Used)), ret, now)
	}
	if s.has["nvmlDeviceGetPowerUsage"] {
		milliwatts, ret := h.GetPowerUsage()
		out.PowerW = d.metric(float64(milliwatts)/1000, ret, now)
	}
	if s.has["nvmlDeviceGetTemperature"] {
		celsius, ret := h.GetTemperature(nvml.TEMPERATURE_GPU)
		out.TemperatureC = d.metric(float64(celsius), ret, now)
	}
	out.Processes, out.ProcessesState = processes(s, h)
	return out
}

func (d *driver) metric(value float64, ret nvml.Return, now time.Time) gpu.Metric {
	switch ret {
	case nvml.SUCCESS:
		return gpu.FreshMetric(value, now)
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		return gpu.UnsupportedMetric()
	case nvml.ERROR_GPU_IS_LOST:
		d.mu.Lock()
		d.lost = true
		d.mu.Unlock()
	}
	return gpu.MissingMetric(codeName(int(ret)))
}

// processes returns those that have the device open. One in both lists counts as compute, since it can run kernels.
func processes(s *session, h nvml.Device) ([]gpu.Process, gpu.MetricState) {
	computeOK := s.hasAny("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2",
		"nvmlDeviceGetComputeRunningProcesses")
	graphicsOK := s.hasAny("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2",
		"nvmlDeviceGetGraphicsRunningProcesses")
	if !computeOK {
		return nil, gpu.Unsupported
	}
	var out []gpu.Process
	infos, ret := h.GetComputeRunningProcesses()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil, gpu.Unsupported
	}
	if ret != nvml.SUCCESS {
		return nil, gpu.Missing
	}
	out = merge(out, infos, gpu.Compute)
	if graphicsOK {
		if infos, ret := h.GetGraphicsRunningProcesses(); ret == nvml.SUCCESS {
			out = merge(out, infos, gpu.Graphics)
		}
	}
	return out, gpu.Fresh
}

// merge adds the processes to the list; one that is there already keeps its type and the larger memory.
func merge(list []gpu.Process, infos []nvml.ProcessInfo, as gpu.ProcessType) []gpu.Process {
	const notAvailable = ^uint64(0) // NVML_VALUE_NOT_AVAILABLE
	for _, info := range infos {
		p := gpu.Process{PID: int(info.Pid), MemoryMiB: gpu.MemoryUnknown, Type: as}
		if info.UsedGpuMemory != notAvailable {
			p.MemoryMiB = mib(info.UsedGpuMemory)
		}
		i := slices.IndexFunc(list, func(x gpu.Process) bool { return x.PID == p.PID })
		if i < 0 {
			list = append(list, p)
			continue
		}
		list[i].MemoryMiB = max(list[i].MemoryMiB, p.MemoryMiB)
	}
	return list
}
