// Package gpu is the agent's vocabulary for accelerators and the sources that report them.
//
// It does no I/O and reads no clock of its own: a source that talks to a driver lives elsewhere (agent/nvml) and is
// asked through [Driver]; decorators that need the time are given a now function.
package gpu

import (
	"context"
	"time"
)

// SourceKind says where an inventory comes from. A host has exactly one kind and never mixes them.
type SourceKind string

// The kinds of source.
const (
	SourceNone      SourceKind = "none"      // no GPUs are looked for, or none can be
	SourceNVML      SourceKind = "nvml"      // an NVIDIA driver
	SourceSimulated SourceKind = "simulated" // a declared list: no hardware, rate 0
)

// Source reports the devices of one host. An answer that says "broken, because ..." is an Inventory with a Problem, not
// an error: the error is for a call that ended before it had an answer (a cancelled context).
type Source interface {
	// Inventory returns what the host has. It may take as long as the device limit allows; call it every few seconds.
	Inventory(ctx context.Context) (Inventory, error)
	// Sample returns one sample per device of the last inventory (empty before the first). Call it about once a second.
	Sample(ctx context.Context) ([]Sample, error)
	// Close gives the driver back. The source must not be used after it.
	Close() error
}

// Driver answers for one GPU at a time. Its calls block in the driver, cannot be cancelled and may hang, which is why
// they take no context: [Isolate] gives each its own goroutine and a limit.
type Driver interface {
	// Kind is the kind of source that this driver makes.
	Kind() SourceKind
	// Host returns the host's facts, opening the driver first where it is not open. Its error is the exact reason why
	// no GPU can be used; the next call tries again.
	Host() (Host, error)
	// Device returns the GPU at index and, behind it, its MIG instances. The error may be a *DeviceError.
	Device(index int) ([]Device, error)
	// Sample returns one sample of the GPU with that UUID and of each of its MIG instances.
	Sample(uuid string) ([]Sample, error)
	// Faults returns the faults that the driver reported since the last call.
	Faults() ([]Fault, error)
	// Close gives the driver back.
	Close() error
}

// Host holds what the driver says about the whole machine.
type Host struct {
	DriverVersion string // "550.54.15"
	CUDAVersion   string // the newest CUDA that the driver runs, "12.4"
	Count         int    // GPUs, MIG instances not counted
}

// Inventory is all that a source knows about the host's devices at one moment.
type Inventory struct {
	Source        SourceKind
	At            time.Time // when it was asked
	DriverVersion string
	CUDAVersion   string
	Devices       []Device // GPUs in the driver's order, each followed by its MIG instances
	// Problem is the exact reason why the host as a whole, or a GPU that never told its UUID, cannot be used. Empty
	// when all is well.
	Problem string
	// RestartNeeded says that only a new agent process can read the driver again (its library was replaced on disk
	// while this process holds the old one). Workspaces outlive such a restart.
	RestartNeeded bool
}

// Find returns the device with that UUID.
func (inv Inventory) Find(uuid string) (Device, bool) {
	for _, d := range inv.Devices {
		if d.UUID == uuid {
			return d, true
		}
	}
	return Device{}, false
}

// Allocatable returns the devices that may be leased now.
func (inv Inventory) Allocatable() []Device {
	var out []Device
	for _, d := range inv.Devices {
		if ok, _ := Allocatable(d); ok {
			out = append(out, d)
		}
	}
	return out
}

// clone copies the slices that a decorator changes, so that a cached inventory stays as it was.
func (inv Inventory) clone() Inventory {
	inv.Devices = append([]Device(nil), inv.Devices...)
	return inv
}
