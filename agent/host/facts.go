package host

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// Facts is what the host is like.
type Facts struct {
	BootID            string
	AgentVersion      string
	EngineVersion     string // empty while the engine gives no answer
	OS                string
	CPUs              int
	MemoryMiB         int64
	DiskFreeMiB       int64
	GPUSource         string // `nvml`, `simulated` or `none`
	DriverVersion     string
	CUDAVersion       string
	Devices           []Device
	Problems          []string
	Unmanaged         []Unmanaged
	Clock             time.Time
	ReservedCPUMillis int64
	ReservedMemoryMiB int64
}

// Device is a device with the state in which it can be leased.
type Device struct {
	gpu.Device
	State  string // `ok`, `failed`, `lost`, `foreign` or `no_runtime`
	Reason string // why it is not ok
}

// factsLoop looks at the host every so often and when something happened.
func (h *Host) factsLoop(ctx context.Context) {
	for {
		h.lookAround(ctx)
		select {
		case <-ctx.Done():
			return
		case <-h.factsWake:
		case <-h.after(h.opts.Times.Facts):
		}
	}
}

func (h *Host) lookAround(ctx context.Context) {
	f := h.gather(ctx)
	if ctx.Err() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	old := h.facts
	if h.factsSeq > 0 && sameFacts(old, f) {
		h.facts = f
		return
	}
	h.facts = f
	h.factsSeq++
	close(h.factsMoved)
	h.factsMoved = make(chan struct{})
}

// sameFacts leaves out the clock, and disk space up to 256 MiB.
func sameFacts(a, b Facts) bool {
	const grain = 256
	a.Clock, b.Clock = time.Time{}, time.Time{}
	a.DiskFreeMiB, b.DiskFreeMiB = a.DiskFreeMiB/grain, b.DiskFreeMiB/grain
	return equalJSON(a, b)
}

func equalJSON(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func (h *Host) gather(ctx context.Context) Facts {
	now := h.clock.Now()
	f := Facts{
		BootID: now.Boot, AgentVersion: h.opts.Version, CPUs: runtime.NumCPU(), Clock: now.Wall,
		ReservedCPUMillis: h.opts.Policy.ReserveCPUMillis, ReservedMemoryMiB: h.opts.Policy.ReserveMemoryMiB,
		Problems: slices.Clone(h.opts.Problems), GPUSource: string(gpu.SourceNone),
	}
	f.MemoryMiB, f.OS = systemFacts()
	info, err := h.engineInfo(ctx)
	if err == nil {
		f.EngineVersion = info.Version
		if info.OS != "" {
			f.OS = info.OS
		}
		f.Problems = append(f.Problems, floors(info)...)
		f.Problems = append(f.Problems, info.Warnings...)
	} else {
		f.Problems = append(f.Problems, "the container engine gives no answer: "+err.Error())
	}
	if free, err := h.diskFree(); err != nil {
		f.Problems = append(f.Problems, err.Error())
	} else if f.DiskFreeMiB = free; free < h.opts.Policy.ReserveDiskMiB {
		f.Problems = append(f.Problems, fmt.Sprintf("%d MiB of disk are free, fewer than the %d to keep: images that are not here yet cannot be fetched", free, h.opts.Policy.ReserveDiskMiB))
	}
	probe := h.probed()
	if probe.Isolation != "" {
		f.Problems = append(f.Problems, "workspaces are not kept apart on the network: "+probe.Isolation)
	}
	if probe.Unavailable != "" {
		f.Problems = append(f.Problems, "whether workspaces are kept apart on the network could not be tried: "+probe.Unavailable)
	}
	h.gatherGPUs(ctx, &f, probe.GPU)
	h.mu.Lock()
	f.Unmanaged = sortedUnmanaged(h.strangers)
	h.mu.Unlock()
	return f
}

// infoLife is how long what the engine says of itself holds while it answers: it changes only with the engine.
const infoLife = time.Minute

// engineInfo asks the engine what it is, at most once in infoLife.
func (h *Host) engineInfo(ctx context.Context) (EngineInfo, error) {
	now := h.clock.Now()
	h.mu.Lock()
	info, fresh := h.info, !h.infoAt.IsZero() && now.Sub(h.infoAt) < infoLife && h.silentSince.IsZero()
	h.mu.Unlock()
	if fresh {
		return info, nil
	}
	info, err := h.runtime.Info(ctx)
	if h.heard(err) != nil {
		return EngineInfo{}, err
	}
	h.mu.Lock()
	h.info, h.infoAt = info, now
	h.mu.Unlock()
	return info, nil
}

func (h *Host) gatherGPUs(ctx context.Context, f *Facts, noRuntime string) {
	inv, err := h.gpus.Inventory(ctx)
	if err != nil {
		f.Problems = append(f.Problems, "GPUs: "+err.Error())
		return
	}
	f.GPUSource, f.DriverVersion, f.CUDAVersion = string(inv.Source), inv.DriverVersion, inv.CUDAVersion
	if inv.Problem != "" && inv.Source != gpu.SourceNone {
		f.Problems = append(f.Problems, "GPUs: "+inv.Problem)
	}
	h.appeared(inv)
	if inv.Source != gpu.SourceNVML {
		noRuntime = ""
	}
	if noRuntime != "" && len(inv.Devices) > 0 {
		f.Problems = append(f.Problems, "GPU runtime missing: "+noRuntime)
	}
	for _, d := range inv.Devices {
		f.Devices = append(f.Devices, deviceState(d, noRuntime))
	}
}

func deviceState(d gpu.Device, noRuntime string) Device {
	out := Device{Device: d, State: "ok"}
	// What comes and goes with every process is told by samples.
	out.Processes = nil
	switch {
	case d.Health.State == gpu.Lost:
		out.State, out.Reason = "lost", d.Health.Reason
	case d.Health.State != gpu.Healthy:
		out.State, out.Reason = "failed", d.Health.Reason
	case len(d.ForeignProcesses) > 0 && !d.ForeignAllowed:
		_, why := gpu.Allocatable(gpu.Device{UUID: d.UUID, Health: d.Health, ForeignProcesses: d.ForeignProcesses})
		out.State, out.Reason = "foreign", why
	case d.MIGPending:
		_, why := gpu.Allocatable(d)
		out.State, out.Reason = "failed", why
	case noRuntime != "":
		out.State, out.Reason = "no_runtime", noRuntime
	}
	out.ForeignProcesses = nil
	return out
}

// floors compares the engine's parts with the versions that fix known escapes (CVE-2025-31133, CVE-2025-52565 and
// CVE-2025-52881 of runc).
func floors(info EngineInfo) []string {
	var out []string
	if v := info.Parts["runc"]; v != "" && below(v, 1, 2, 8) {
		out = append(out, "runc "+v+" has known ways out of a container; install 1.2.8, 1.3.3 or a newer one, or your distribution's fixed package")
	}
	if info.Version != "" && below(info.Version, 20, 10, 0) {
		out = append(out, "Docker "+info.Version+" is older than 20.10, the oldest that works")
	}
	return out
}

// below compares the leading numbers of a version; one that cannot be read is not below.
func below(version string, floor ...int) bool {
	var have [3]int
	if n, _ := fmt.Sscanf(strings.TrimPrefix(version, "v"), "%d.%d.%d", &have[0], &have[1], &have[2]); n < 2 {
		return false
	}
	for i, f := range floor {
		if have[i] != f {
			return have[i] < f
		}
	}
	return false
}

func systemFacts() (memoryMiB int64, os string) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		memoryMiB = int64(info.Totalram) * int64(info.Unit) >> 20
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		os = unix.ByteSliceToString(name.Sysname[:]) + " " + unix.ByteSliceToString(name.Release[:])
	}
	return memoryMiB, os
}

func sortedUnmanaged(m map[string]Unmanaged) []Unmanaged {
	return slices.SortedFunc(maps.Values(m), func(a, b Unmanaged) int { return cmp.Compare(a.Name, b.Name) })
}

func equalUnmanaged(a, b Unmanaged) bool {
	return a.Name == b.Name && a.Key == b.Key && a.Running == b.Running && slices.Equal(a.Devices, b.Devices)
}

func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
