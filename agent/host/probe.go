package host

import (
	"context"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
)

const (
	// probeEvery is the least time between two tries: an engine that comes and goes is not tried out each time.
	probeEvery = time.Minute
	// probeAgain is the time to another try after one that failed, or that found no GPU runtime.
	probeAgain = 10 * time.Minute
)

// probeLoop tries, after each connection to the engine and when the first device appears, what only a try can tell.
func (h *Host) probeLoop(ctx context.Context) {
	var again <-chan time.Time
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-h.probeWake:
		case <-h.probeDevice:
		case <-again:
		}
		again = nil
		if !h.probe(ctx) {
			again = h.after(probeAgain)
		}
		select {
		case <-ctx.Done():
		case <-h.after(probeEvery):
		case <-h.probeDevice:
			wake(h.probeDevice) // for the select above
		}
	}
}

// probe tries out the engine, with a device where there is one. It reports whether all was found out and is well.
func (h *Host) probe(ctx context.Context) (well bool) {
	request := ProbeRequest{InitFile: h.opts.InitFile}
	if inv, err := h.gpus.Inventory(ctx); err == nil {
		request.Device = deviceToTry(inv)
	}
	result, err := h.runtime.Probe(ctx, request)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		h.log.Warn("the engine could not be tried out", "error", err)
		result.Unavailable = err.Error()
	}
	h.mu.Lock()
	if request.Device == "" {
		result.GPU = h.probeResult.GPU // what an earlier try with a device found
	}
	h.probeResult, h.probeDone, h.probeHadDevice = result, true, h.probeHadDevice || request.Device != ""
	h.mu.Unlock()
	wake(h.factsWake)
	return err == nil && result.GPU == "" && result.Unavailable == ""
}

// deviceToTry is one that the engine should be able to give to a container; empty without.
func deviceToTry(inv gpu.Inventory) string {
	i := slices.IndexFunc(inv.Devices, func(d gpu.Device) bool { return d.Health.State == gpu.Healthy && d.Kind != gpu.KindMIGParent })
	if inv.Source != gpu.SourceNVML || i < 0 {
		return ""
	}
	return inv.Devices[i].UUID
}

// appeared has the engine tried with a device, where it was tried only without.
func (h *Host) appeared(inv gpu.Inventory) {
	h.mu.Lock()
	untried := h.probeDone && !h.probeHadDevice
	h.mu.Unlock()
	if untried && deviceToTry(inv) != "" {
		wake(h.probeDevice)
	}
}

// probed returns what the last try showed.
func (h *Host) probed() ProbeResult {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.probeResult
}

// probedGPU returns why the engine gives no GPU to containers, empty when it does, and whether that was tried.
func (h *Host) probedGPU() (why string, tried bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.probeResult.GPU, h.probeHadDevice
}
