package gpu

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// maxSimulated bounds the devices of one simulated host; real hosts have up to 16.
const maxSimulated = 256

// Load is what a simulated device is doing.
type Load struct {
	UtilisationPct float64 // 0..100
	MemoryPct      float64 // share of the device's memory, 0..100
	Processes      []Process
}

// SimulatedConfig declares the devices of a simulated host.
type SimulatedConfig struct {
	// Host makes the UUIDs: the same host name and list give the same ones after a restart.
	Host string
	// Spec is the list, "4x4090" or "2xA100-80GB,1xH100"; KnownModels has the names. Empty or "none": no devices.
	Spec string
	// DriverVersion and CUDAVersion are what images are checked against. Defaults: "570.124.06" and "12.8".
	DriverVersion, CUDAVersion string
	// Load gives a leased device's load at a time; leased is false for a device without a lease, which then idles. It
	// must be deterministic. Nil: all idle. See Wave.
	Load func(uuid string, at time.Time) (load Load, leased bool)
	// Now is the clock.
	Now func() time.Time
}

// Simulated returns the source of a declared list of devices. Each is marked Simulated and has a UUID "SIM-...".
func Simulated(cfg SimulatedConfig) (Source, error) {
	models, err := parseSimulated(cfg.Spec)
	if err != nil {
		return nil, err
	}
	if cfg.DriverVersion == "" {
		cfg.DriverVersion = "570.124.06"
	}
	if cfg.CUDAVersion == "" {
		cfg.CUDAVersion = "12.8"
	}
	s := &simulated{cfg: cfg, models: models}
	for i, m := range models {
		s.devices = append(s.devices, Device{
			UUID: simulatedUUID(cfg.Host, i, m.key), Index: i, Kind: KindGPU, Model: m.name, ModelKey: m.key,
			MemoryMiB: m.memoryMiB, ComputeCapability: m.capability, DriverVersion: cfg.DriverVersion,
			CUDAVersion: cfg.CUDAVersion, Health: Health{State: Healthy}, Simulated: true,
		})
	}
	return s, nil
}

type simulated struct {
	cfg     SimulatedConfig
	models  []knownModel
	devices []Device
}

var _ Source = (*simulated)(nil)

func (s *simulated) Inventory(ctx context.Context) (Inventory, error) {
	inv := Inventory{
		Source: SourceSimulated, At: s.cfg.Now(), DriverVersion: s.cfg.DriverVersion, CUDAVersion: s.cfg.CUDAVersion,
		Devices: s.devices,
	}
	return inv.clone(), ctx.Err()
}

func (s *simulated) Sample(ctx context.Context) ([]Sample, error) {
	now := s.cfg.Now()
	out := make([]Sample, 0, len(s.devices))
	for i, d := range s.devices {
		var load Load
		if s.cfg.Load != nil {
			if l, leased := s.cfg.Load(d.UUID, now); leased {
				load = l
			}
		}
		m := s.models[i]
		util := min(max(load.UtilisationPct, 0), 100)
		used := float64(m.memoryMiB) * min(max(load.MemoryPct, 0), 100) / 100
		out = append(out, Sample{
			UUID: d.UUID, At: now, Simulated: true,
			UtilisationPct: FreshMetric(util, now),
			MemoryUsedMiB:  FreshMetric(float64(int64(used)), now),
			PowerW:         FreshMetric(m.idleW+(m.loadW-m.idleW)*util/100, now),
			TemperatureC:   FreshMetric(float64(int(32+util*0.4)), now),
			Processes:      load.Processes, ProcessesState: Fresh,
		})
	}
	return out, ctx.Err()
}

func (s *simulated) Close() error { return nil }

// simulatedUUID is "SIM-" and a UUID made of the host's name, the place in the list and the model. A list that grows at
// its end keeps the UUIDs it had; a place that changes its model gets another, since it is another device to the bill.
func simulatedUUID(host string, index int, key string) string {
	h := sha256.Sum256(fmt.Appendf(nil, "carrel simulated device\x00%s\x00%d\x00%s", host, index, key))
	return fmt.Sprintf("SIM-%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// parseSimulated reads "2xA100-80GB,1xH100"; a part without a count is one device.
func parseSimulated(spec string) ([]knownModel, error) {
	spec = strings.TrimSpace(spec)
	if spec == "" || strings.EqualFold(spec, "none") {
		return nil, nil
	}
	var out []knownModel
	for part := range strings.SplitSeq(spec, ",") {
		count, key, err := parsePart(strings.TrimSpace(part))
		if err != nil {
			return nil, fmt.Errorf("simulated GPUs %q: %w", spec, err)
		}
		m, ok := findModel(key)
		if !ok {
			return nil, fmt.Errorf("simulated GPUs %q: unknown model %q; known are %s",
				spec, key, strings.Join(KnownModels(), ", "))
		}
		if len(out)+count > maxSimulated {
			return nil, fmt.Errorf("simulated GPUs %q: more than %d devices on one host", spec, maxSimulated)
		}
		for range count {
			out = append(out, m)
		}
	}
	return out, nil
}

func parsePart(part string) (count int, key string, err error) {
	if part == "" {
		return 0, "", fmt.Errorf("an empty part; write COUNTxMODEL, as in 4x4090")
	}
	number, model, found := strings.Cut(part, "x")
	if !found || strings.Trim(number, "0123456789") != "" || number == "" {
		if strings.HasPrefix(part, "-") {
			return 0, "", fmt.Errorf("the count in %q must be 1 to %d", part, maxSimulated)
		}
		return 1, part, nil
	}
	count, err = strconv.Atoi(number)
	if err != nil || count < 1 || count > maxSimulated {
		return 0, "", fmt.Errorf("the count in %q must be 1 to %d", part, maxSimulated)
	}
	return count, strings.TrimSpace(model), nil
}

func findModel(key string) (knownModel, bool) {
	for _, m := range knownModels() {
		if strings.EqualFold(m.key, key) {
			return m, true
		}
	}
	return knownModel{}, false
}

// Wave is a deterministic load for demonstrations: work of 4 min at 60 to 98 % with a pause of 1 min, out of step from
// device to device. Memory stays held in the pause, as a notebook holds it.
func Wave(uuid string, at time.Time) Load {
	h := sha256.Sum256([]byte(uuid))
	const period, work = 300, 240
	t := (at.Unix() + int64(h[0])) % period
	load := Load{MemoryPct: 40 + float64(h[1]%50)}
	if t < work {
		load.UtilisationPct = 60 + float64((t*7+int64(h[2]))%39)
	}
	return load
}
