package host

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// DeviceReading is a sample of a device with the moment's distance.
type DeviceReading struct {
	gpu.Sample
	Age time.Duration
}

// RunReading is what one run uses.
type RunReading struct {
	Key   Key
	Usage Usage
}

// usageAtOnce bounds the questions that the engine answers at the same time.
const usageAtOnce = 8

// Sample measures devices and running containers. What gives no answer is left out.
func (h *Host) Sample(ctx context.Context) ([]DeviceReading, []RunReading, error) {
	samples, err := h.gpus.Sample(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("sample devices: %w", err)
	}
	now := h.clock.Now().Wall
	devices := make([]DeviceReading, 0, len(samples))
	for _, s := range samples {
		devices = append(devices, DeviceReading{Sample: s, Age: max(now.Sub(s.At), 0)})
	}
	return devices, h.usage(ctx), nil
}

func (h *Host) usage(ctx context.Context) []RunReading {
	records := h.journal.Records((*Record).running)
	var mu sync.Mutex
	var wg sync.WaitGroup
	var out []RunReading
	slots := make(chan struct{}, usageAtOnce)
	for _, r := range records {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			u, err := h.runtime.Usage(ctx, r.ContainerID)
			if err != nil {
				return // it may just have ended; the next sample tells
			}
			mu.Lock()
			defer mu.Unlock()
			out = append(out, RunReading{Key: r.Key, Usage: u})
		})
	}
	wg.Wait()
	return out
}

// gpuHeld asks the driver afresh, so that nothing rests on an inventory from before.
func (h *Host) gpuHeld(ctx context.Context, k Key, ids map[string]bool) string {
	inv, err := h.gpus.Inventory(ctx)
	if err != nil {
		return "the GPU driver gives no answer: " + err.Error()
	}
	samples, err := h.gpus.Sample(ctx)
	if err != nil {
		return "the GPU driver gives no answer: " + err.Error()
	}
	byID := map[string]gpu.Sample{}
	for _, s := range samples {
		byID[s.UUID] = s
	}
	for id := range ids {
		d, listed := inv.Find(id)
		s, sampled := byID[id]
		// What is no longer there holds nothing, and is not given out until it is back and without others' processes. Its last
		// sample may still be shown, and counts for nothing.
		if listed && d.Health.State == gpu.Lost || !listed && !sampled && inv.Problem == "" {
			continue
		}
		if why := heldBy(k, id, s); why != "" {
			return why
		}
	}
	return ""
}

// heldBy says which process of a run, or of nobody that can be named, is on a device.
func heldBy(k Key, id string, s gpu.Sample) string {
	if s.UUID == "" || s.ProcessesState == gpu.Missing || s.ProcessesState == gpu.Stale {
		return "the GPU driver does not say what runs on " + id
	}
	for _, p := range s.Processes {
		if p.Type == gpu.Compute && (p.Workspace == k.String() || p.Workspace == "" && p.Name == "") {
			return fmt.Sprintf("process %d is still on %s", p.PID, id)
		}
	}
	return ""
}
