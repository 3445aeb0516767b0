//go:build cgo && linux

package nvml

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// Device implements gpu.Driver.
func (d *driver) Device(index int) ([]gpu.Device, error) {
	s, err := d.acquire()
	if err != nil {
		return nil, err
	}
	defer d.release()
	h, ret := s.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return nil, d.failure(nil, "handle", ret)
	}
	uuid, ret := h.GetUUID()
	if ret != nvml.SUCCESS {
		return nil, d.failure(h, "uuid", ret)
	}
	m := d.remember(h, uuid)
	name, ret := h.GetName()
	if ret != nvml.SUCCESS {
		return nil, d.failure(h, "name", ret)
	}
	dev := gpu.Device{
		UUID: uuid, Index: index, Kind: gpu.KindGPU, Model: name, DriverVersion: s.host.DriverVersion,
		CUDAVersion: s.host.CUDAVersion, Health: gpu.Health{State: gpu.Healthy},
	}
	if err := d.describe(s, h, &dev, m); err != nil {
		return nil, err
	}
	if err := d.register(s, h, m); err != nil {
		return nil, err
	}
	if dev.MIGMode != gpu.MIGOn {
		d.setInstances(m, nil)
		return []gpu.Device{dev}, nil
	}
	dev.Kind = gpu.KindMIGParent
	dev.MIGPending = false // its instances work on until the reset
	instances, err := d.instances(s, h, dev, m)
	if err != nil {
		return nil, err
	}
	for _, i := range instances {
		dev.Instances = append(dev.Instances, i.UUID)
	}
	return append([]gpu.Device{dev}, instances...), nil
}

func (d *driver) remember(h nvml.Device, uuid string) *members {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.known[h] = uuid
	m := d.gpus[uuid]
	if m == nil || m.device != h {
		m = &members{device: h}
		d.gpus[uuid] = m
	}
	return m
}

func (d *driver) setInstances(m *members, list []instance) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m.instances = list
}

// gone are the codes after which nothing else need be asked of a GPU. All others, NOT_SUPPORTED above all, leave one field
// without a value.
func gone(ret nvml.Return) bool {
	return ret == nvml.ERROR_GPU_IS_LOST || ret == nvml.ERROR_RESET_REQUIRED || ret == nvml.ERROR_UNINITIALIZED ||
		ret == nvml.ERROR_DRIVER_NOT_LOADED
}

// describe fills in what the driver says about a whole GPU.
func (d *driver) describe(s *session, h nvml.Device, dev *gpu.Device, m *members) error {
	if s.has["nvmlDeviceGetMemoryInfo"] {
		memory, ret := h.GetMemoryInfo()
		if gone(ret) {
			return d.failure(h, "memory", ret)
		}
		if ret == nvml.SUCCESS {
			d.mu.Lock()
			m.memoryMiB = mib(memory.Total)
			d.mu.Unlock()
		}
	}
	dev.MemoryMiB = m.memoryMiB // a GPU does not change its size: the last figure holds
	dev.ModelKey = gpu.ModelKey(dev.Model, dev.MemoryMiB)
	if s.has["nvmlDeviceGetCudaComputeCapability"] {
		if major, minor, ret := h.GetCudaComputeCapability(); ret == nvml.SUCCESS {
			dev.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
		} else if gone(ret) {
			return d.failure(h, "compute capability", ret)
		}
	}
	if s.hasAny("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo") {
		if pci, ret := h.GetPciInfo(); ret == nvml.SUCCESS {
			dev.PCIBusID = text(pci.BusId[:])
		}
	}
	if s.has["nvmlDeviceGetMigMode"] {
		if current, pending, ret := h.GetMigMode(); ret == nvml.SUCCESS {
			dev.MIGMode, dev.MIGPending = gpu.MIGOff, current != pending
			if current == nvml.DEVICE_MIG_ENABLE {
				dev.MIGMode = gpu.MIGOn
			}
		}
	}
	dev.Recovery = recovery(s, h)
	dev.Processes, _ = processes(s, h)
	return nil
}

// instances lists the MIG instances of a GPU. A compute instance that does not exist has no handle.
func (d *driver) instances(s *session, h nvml.Device, parent gpu.Device, m *members) ([]gpu.Device, error) {
	if !s.hasAll("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex") {
		return nil, nil
	}
	count, ret := h.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil, d.failure(h, "number of MIG instances", ret)
	}
	var devices []gpu.Device
	var handles []instance
	for i := range count {
		mig, ret := h.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, d.failure(h, fmt.Sprintf("MIG instance %d", i), ret)
		}
		dev, handle, err := d.instance(s, mig, parent)
		if err != nil {
			return nil, err
		}
		devices, handles = append(devices, dev), append(handles, handle)
	}
	d.setInstances(m, handles)
	return devices, nil
}

func (d *driver) instance(s *session, mig nvml.Device, parent gpu.Device) (gpu.Device, instance, error) {
	uuid, ret := mig.GetUUID()
	if ret != nvml.SUCCESS {
		return gpu.Device{}, instance{}, fmt.Errorf("a MIG instance of %s: %w", parent.UUID, d.failure(nil, "uuid", ret))
	}
	dev := gpu.Device{
		UUID: uuid, Index: parent.Index, Kind: gpu.KindMIGInstance, Parent: parent.UUID, DriverVersion: parent.DriverVersion,
		CUDAVersion: parent.CUDAVersion, ComputeCapability: parent.ComputeCapability, PCIBusID: parent.PCIBusID,
		Health: gpu.Health{State: gpu.Healthy},
	}
	dev.Model = parent.Model
	if name, ret := mig.GetName(); ret == nvml.SUCCESS {
		dev.Model = name
	}
	// "NVIDIA A100-SXM4-40GB MIG 1g.5gb+me": the profile is the name's end.
	if _, profile, ok := strings.Cut(dev.Model, " MIG "); ok {
		dev.Profile = profile
	}
	dev.ModelKey = gpu.InstanceKey(parent.ModelKey, dev.Profile)
	if s.has["nvmlDeviceGetMemoryInfo"] {
		if memory, ret := mig.GetMemoryInfo(); ret == nvml.SUCCESS {
			dev.MemoryMiB = mib(memory.Total)
		}
	}
	dev.Processes, _ = processes(s, mig)
	handle := instance{device: mig, uuid: uuid, gi: -1, ci: -1}
	if s.hasAll("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId") {
		if gi, ret := mig.GetGpuInstanceId(); ret == nvml.SUCCESS {
			handle.gi = gi
		}
		if ci, ret := mig.GetComputeInstanceId(); ret == nvml.SUCCESS {
			handle.ci = ci
		}
	}
	if err := d.reachable(s, uuid); err != nil {
		dev.Health = gpu.Health{State: gpu.Failed, Reason: err.Error(), Since: d.cfg.Now()}
	}
	return dev, handle, nil
}

// reachable asks for an instance by its UUID, as the container runtime will. Drivers whose ids name parent and place
// ("MIG-GPU-.../7/0") do not answer that and need not.
func (d *driver) reachable(s *session, uuid string) error {
	if !s.has["nvmlDeviceGetHandleByUUID"] || strings.HasPrefix(uuid, "MIG-GPU-") {
		return nil
	}
	if _, ret := s.lib.DeviceGetHandleByUUID(uuid); ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
		return &gpu.DeviceError{UUID: uuid, Call: "handle", Code: codeName(int(ret)), Lost: ret == nvml.ERROR_GPU_IS_LOST}
	}
	return nil
}

// register asks for XID events of a GPU, once per session. A GPU without them is watched by questions alone.
func (d *driver) register(s *session, h nvml.Device, m *members) error {
	if s.events == nil || m.registered {
		return nil
	}
	supported, ret := h.GetSupportedEventTypes()
	if gone(ret) {
		return d.failure(h, "event types", ret)
	}
	if ret == nvml.SUCCESS && supported&nvml.EventTypeXidCriticalError != 0 {
		if ret := h.RegisterEvents(nvml.EventTypeXidCriticalError, s.events); gone(ret) {
			return d.failure(h, "events", ret)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m.registered = true
	return nil
}

// recovery asks the driver (570 and later) what it wants done.
func recovery(s *session, h nvml.Device) gpu.Recovery {
	if !s.has["nvmlDeviceGetFieldValues"] {
		return gpu.RecoveryUnknown
	}
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if ret := h.GetFieldValues(values); ret != nvml.SUCCESS || values[0].NvmlReturn != uint32(nvml.SUCCESS) {
		return gpu.RecoveryUnknown
	}
	switch nvml.DeviceGpuRecoveryAction(binary.NativeEndian.Uint32(values[0].Value[:4])) {
	case nvml.GPU_RECOVERY_ACTION_NONE:
		return gpu.RecoveryNone
	case nvml.GPU_RECOVERY_ACTION_GPU_RESET:
		return gpu.RecoveryReset
	case nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:
		return gpu.RecoveryReboot
	case nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:
		return gpu.RecoveryDrain
	case nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:
		return gpu.RecoveryDrainReset
	default:
		return gpu.RecoveryOther
	}
}

func mib(bytes uint64) int64 { return int64(bytes >> 20) }

// text is a C string in a fixed array.
func text(chars []int8) string {
	b := make([]byte, 0, len(chars))
	for _, c := range chars {
		b = append(b, byte(c))
	}
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}
