package gpu

import (
	"fmt"
	"strings"
	"time"
)

// Kind says what a device is a part of.
type Kind string

// The kinds of device.
const (
	KindGPU         Kind = "gpu"          // a whole GPU
	KindMIGParent   Kind = "mig_parent"   // a GPU in MIG mode: shown, never leased itself
	KindMIGInstance Kind = "mig_instance" // a slice of one
)

// MIGMode is the MIG mode of a whole GPU.
type MIGMode string

// The MIG modes; a GPU that knows no MIG has MIGNone.
const (
	MIGNone MIGMode = ""
	MIGOff  MIGMode = "off"
	MIGOn   MIGMode = "on"
)

// HealthState says whether a device can be trusted with work.
type HealthState string

// The health states.
const (
	Healthy HealthState = "ok"
	Failed  HealthState = "failed" // there, and not to be used
	Lost    HealthState = "lost"   // no longer there; the UUID is the last known one
)

// Health is a device's state with the reason for it.
type Health struct {
	State   HealthState
	Reason  string    // for people; empty when healthy
	Since   time.Time // when it left Healthy; zero when healthy
	LastXID int       // the last XID that the driver reported, also a harmless one; 0 when none
}

// Device is a whole GPU or a MIG instance. Its identity is the UUID: indexes change at a reboot, with a card added, and
// between tools.
type Device struct {
	UUID              string // "GPU-...", "MIG-..." (either form), "SIM-..."
	Index             int    // the driver's index of the GPU; shown, never a key
	Kind              Kind
	Model             string // the driver's name, "NVIDIA GeForce RTX 4090"
	ModelKey          string // what people type, "4090": see ModelKey
	MemoryMiB         int64  // the driver's figure, never the name's
	DriverVersion     string
	CUDAVersion       string // "12.4"
	ComputeCapability string // "8.9"
	PCIBusID          string // "00000000:07:00.0"; empty when the driver does not say

	MIGMode    MIGMode  // of a whole GPU
	MIGPending bool     // a mode change waits for a GPU reset
	Instances  []string // UUIDs of a MIG parent's instances
	Parent     string   // UUID of a MIG instance's GPU
	Profile    string   // of a MIG instance, "1g.10gb+me": a label, nothing is computed from it

	Health   Health
	Recovery Recovery // what the driver itself asks for

	Processes        []Process // those on the device when the inventory was taken
	ForeignProcesses []Process // compute processes among them that are no workspace's
	ForeignAllowed   bool      // an admin said that foreign processes do not matter here
	Excluded         bool      // an admin took the device out
	Simulated        bool
}

// Recovery is the action that the driver asks for after a fault.
type Recovery string

// The recovery actions: nvmlDeviceGpuRecoveryAction_t in nvml.h of driver 570 and later.
const (
	RecoveryUnknown    Recovery = ""     // the driver does not say
	RecoveryNone       Recovery = "none" // it says that nothing is needed
	RecoveryReset      Recovery = "reset the GPU"
	RecoveryReboot     Recovery = "reboot the host"
	RecoveryDrain      Recovery = "drain peer-to-peer work"
	RecoveryDrainReset Recovery = "drain and reset the GPU"
	RecoveryOther      Recovery = "act as nvidia-smi -q says under GPU Recovery Action"
)

// Needed reports whether the driver asks for something to be done.
func (r Recovery) Needed() bool { return r != RecoveryUnknown && r != RecoveryNone }

// DeviceError is a driver's failure on one GPU.
type DeviceError struct {
	UUID string // when known
	Call string // what was asked, "uuid"
	Code string // NVML's name without the prefix, "GPU_IS_LOST"
	Lost bool   // the GPU is no longer there
}

func (e *DeviceError) Error() string {
	if e.UUID == "" {
		return fmt.Sprintf("%s: %s", e.Call, e.Code)
	}
	return fmt.Sprintf("%s of %s: %s", e.Call, e.UUID, e.Code)
}

// Allocatable reports whether the device may be given to a workspace now and, where not, why.
func Allocatable(d Device) (ok bool, reason string) {
	switch {
	case d.Excluded:
		return false, "excluded by an admin"
	case d.UUID == "":
		return false, "the driver does not tell its UUID"
	case d.Health.State == Lost:
		return false, "lost: " + d.Health.Reason
	case d.Health.State != Healthy:
		return false, "failed: " + d.Health.Reason
	case d.Kind == KindMIGParent && len(d.Instances) == 0:
		return false, "MIG on, nothing to allocate"
	case d.Kind == KindMIGParent:
		return false, "MIG on: its instances are given out instead"
	case d.MIGPending:
		return false, "a MIG mode change waits for a reset of the GPU"
	case len(d.ForeignProcesses) > 0 && !d.ForeignAllowed:
		return false, "in use outside Carrel: " + describe(d.ForeignProcesses)
	}
	return true, ""
}

// UsableMiB is the memory that a workspace can have: the device's, less what graphics processes (a desktop) hold.
func (d Device) UsableMiB() int64 {
	usable := d.MemoryMiB
	for _, p := range d.Processes {
		if p.Type == Graphics && p.MemoryMiB > 0 {
			usable -= p.MemoryMiB
		}
	}
	return max(usable, 0)
}

// describe names processes for a notice: "pid 4242 (python) with 30720 MiB, pid 7".
func describe(ps []Process) string {
	parts := make([]string, 0, len(ps))
	for _, p := range ps {
		s := fmt.Sprintf("pid %d", p.PID)
		if p.Name != "" {
			s += fmt.Sprintf(" (%s)", p.Name)
		}
		if p.MemoryMiB >= 0 {
			s += fmt.Sprintf(" with %d MiB", p.MemoryMiB)
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, ", ")
}

// Leased says what became of a device that a workspace holds: ok while it is there and healthy, else the reason to show
// on the workspace. It never names a replacement: a workspace is not moved silently.
func Leased(inv Inventory, uuid string) (ok bool, reason string) {
	d, found := inv.Find(uuid)
	switch {
	case !found && inv.Problem != "":
		return false, "device " + uuid + " cannot be seen: " + inv.Problem
	case !found:
		return false, "assigned device " + uuid + " no longer exists"
	case d.Kind == KindMIGParent:
		return false, "device " + uuid + " is in MIG mode now and no whole GPU any more"
	case d.Health.State == Lost:
		return false, "device " + uuid + " is lost: " + d.Health.Reason
	case d.Health.State != Healthy:
		return false, "device " + uuid + " failed: " + d.Health.Reason
	}
	return true, ""
}
