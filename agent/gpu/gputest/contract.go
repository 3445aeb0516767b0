// Package gputest holds the contract that every source of devices keeps.
package gputest

import (
	"context"
	"testing"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// Contract runs the contract against the sources that open makes. Each must have at least one device and no Problem.
func Contract(t *testing.T, open func(t *testing.T) gpu.Source) {
	t.Helper()
	source := func(t *testing.T) gpu.Source {
		t.Helper()
		src := open(t)
		t.Cleanup(func() {
			if err := src.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
		return src
	}
	t.Run("no samples before the first inventory or samples of real devices", func(t *testing.T) {
		src := source(t)
		samples, err := src.Sample(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		known := uuids(t, inventory(t, src))
		for _, s := range samples {
			if !known[s.UUID] {
				t.Errorf("sample of %q, which the inventory does not have", s.UUID)
			}
		}
	})
	t.Run("devices are complete and unique", func(t *testing.T) { devices(t, inventory(t, source(t))) })
	t.Run("two inventories agree", func(t *testing.T) {
		src := source(t)
		first, second := uuids(t, inventory(t, src)), uuids(t, inventory(t, src))
		if len(first) != len(second) {
			t.Errorf("%d devices, then %d", len(first), len(second))
		}
	})
	t.Run("the caller may change what it got", func(t *testing.T) {
		src := source(t)
		inv := inventory(t, src)
		want := inv.Devices[0].UUID
		inv.Devices[0] = gpu.Device{UUID: "changed"}
		if got := inventory(t, src).Devices[0].UUID; got != want {
			t.Errorf("UUID is %q, want %q", got, want)
		}
	})
	t.Run("one sample per device", func(t *testing.T) {
		src := source(t)
		samples(t, src, inventory(t, src))
	})
	t.Run("a cancelled context is an error", func(t *testing.T) {
		src := source(t)
		ctx := cancelled(t)
		if _, err := src.Inventory(ctx); err == nil {
			t.Error("an inventory from a cancelled context")
		}
		if _, err := src.Sample(ctx); err == nil {
			t.Error("samples from a cancelled context")
		}
	})
}

func inventory(t *testing.T, src gpu.Source) gpu.Inventory {
	t.Helper()
	inv, err := src.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if inv.Problem != "" || len(inv.Devices) == 0 {
		t.Fatalf("%d devices, problem %q", len(inv.Devices), inv.Problem)
	}
	return inv
}

func uuids(t *testing.T, inv gpu.Inventory) map[string]bool {
	t.Helper()
	set := map[string]bool{}
	for _, d := range inv.Devices {
		if set[d.UUID] {
			t.Errorf("UUID %q twice", d.UUID)
		}
		set[d.UUID] = true
	}
	return set
}

func devices(t *testing.T, inv gpu.Inventory) {
	t.Helper()
	known := uuids(t, inv)
	for _, d := range inv.Devices {
		if d.UUID == "" || d.Model == "" || d.ModelKey == "" || d.MemoryMiB <= 0 || d.ComputeCapability == "" ||
			d.DriverVersion == "" || d.CUDAVersion == "" || d.Health.State == "" {
			t.Errorf("incomplete: %+v", d)
		}
		if (inv.Source == gpu.SourceSimulated) != d.Simulated {
			t.Errorf("%s from source %s says simulated=%v", d.UUID, inv.Source, d.Simulated)
		}
		kinship(t, d, known)
	}
}

// kinship holds a device's parent and instances against its kind.
func kinship(t *testing.T, d gpu.Device, known map[string]bool) {
	t.Helper()
	switch d.Kind {
	case gpu.KindMIGInstance:
		if !known[d.Parent] || d.Profile == "" {
			t.Errorf("MIG instance without its parent or profile: %+v", d)
		}
	case gpu.KindMIGParent:
		if ok, _ := gpu.Allocatable(d); ok {
			t.Errorf("MIG parent %s can be allocated", d.UUID)
		}
		for _, i := range d.Instances {
			if !known[i] {
				t.Errorf("instance %s of %s is not listed", i, d.UUID)
			}
		}
	case gpu.KindGPU:
		if d.Parent != "" || len(d.Instances) > 0 {
			t.Errorf("whole GPU with parent or instances: %+v", d)
		}
	default:
		t.Errorf("kind %q", d.Kind)
	}
}

func samples(t *testing.T, src gpu.Source, inv gpu.Inventory) {
	t.Helper()
	got, err := src.Sample(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, s := range got {
		seen[s.UUID]++
		if s.At.IsZero() || s.ProcessesState == "" {
			t.Errorf("incomplete: %+v", s)
		}
		for name, m := range map[string]gpu.Metric{
			"utilisation": s.UtilisationPct, "memory": s.MemoryUsedMiB, "power": s.PowerW, "temperature": s.TemperatureC,
		} {
			if m.State == "" || m.State == gpu.Fresh && m.At.IsZero() {
				t.Errorf("%s of %s: %+v", name, s.UUID, m)
			}
		}
		if u := s.UtilisationPct; u.Known() && (u.Value < 0 || u.Value > 100) {
			t.Errorf("utilisation of %s is %v", s.UUID, u.Value)
		}
	}
	for _, d := range inv.Devices {
		if seen[d.UUID] != 1 {
			t.Errorf("%d samples of %s", seen[d.UUID], d.UUID)
		}
	}
}

func cancelled(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}
