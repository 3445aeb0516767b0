package gateway

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/carrel-dev/carrel/services/fleet"
)

// scrapeTimeout bounds what one scrape may read.
const scrapeTimeout = 10 * time.Second

// fleetMetrics reads the fleet's figures at each scrape, so that none is kept twice.
type fleetMetrics struct {
	g *Gateway

	workspaces, devices, hosts, streams, bytes *prometheus.Desc
}

func newFleetMetrics(g *Gateway) *fleetMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("carrel_"+name, help, labels, nil)
	}
	return &fleetMetrics{
		g:          g,
		workspaces: desc("workspaces", "Workspaces by state.", "state"),
		devices:    desc("devices", "Devices that can be leased, by pool, model and whether they are free, leased or blocked.", "pool", "model", "state"),
		hosts:      desc("hosts_connected", "Hosts that are connected."),
		streams:    desc("streams_open", "Open byte streams of users."),
		bytes:      desc("stream_bytes_total", "Bytes of users' streams, by direction.", "direction"),
	}
}

// Describe implements prometheus.Collector.
func (m *fleetMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.workspaces, m.devices, m.hosts, m.streams, m.bytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *fleetMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	stats := m.g.tunnel.Stats()
	ch <- prometheus.MustNewConstMetric(m.hosts, prometheus.GaugeValue, float64(stats.Hosts))
	ch <- prometheus.MustNewConstMetric(m.streams, prometheus.GaugeValue, float64(stats.Streams))
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(stats.Up), "up")
	ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(stats.Down), "down")
	m.collectWorkspaces(ctx, ch)
	m.collectDevices(ctx, ch)
}

func (m *fleetMetrics) collectWorkspaces(ctx context.Context, ch chan<- prometheus.Metric) {
	counts := map[fleet.State]int{}
	for after := ""; ; {
		page, next, err := m.g.db.Workspaces(ctx, fleet.WorkspaceFilter{Limit: 1000, After: after})
		if err != nil {
			ch <- prometheus.NewInvalidMetric(m.workspaces, err)
			return
		}
		for _, w := range page {
			counts[w.State]++
		}
		if next == "" {
			break
		}
		after = next
	}
	for _, state := range fleet.States() {
		if state != fleet.StateDeleted {
			ch <- prometheus.MustNewConstMetric(m.workspaces, prometheus.GaugeValue, float64(counts[state]), string(state))
		}
	}
}

func (m *fleetMetrics) collectDevices(ctx context.Context, ch chan<- prometheus.Metric) {
	rows, err := m.g.db.Devices(ctx, fleet.DeviceFilter{})
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.devices, err)
		return
	}
	counts := map[[3]string]int{}
	for _, row := range rows {
		state := "blocked"
		switch {
		case row.Lease != nil:
			state = "leased"
		case row.Free:
			state = "free"
		}
		counts[[3]string{row.Pool, row.Model, state}]++
	}
	for key, n := range counts {
		ch <- prometheus.MustNewConstMetric(m.devices, prometheus.GaugeValue, float64(n), key[:]...)
	}
}

// metrics returns the handler of the Prometheus listener.
func (g *Gateway) metrics() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), newFleetMetrics(g))
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}
