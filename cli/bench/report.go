//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/carrel-dev/carrel/cli/bench/rig"
)

// better says which side of its target a ratio should be on.
type better string

const (
	higher better = "higher"
	lower  better = "lower"
	// noTarget is for rows without a target.
	noTarget better = ""
)

// gate is the part of a target that a run must reach: a busy machine swings, so that the target itself is published and
// 0.8 of it is held.
const gate = 0.8

// row is one line of the result: a ratio, what it should be, and the figures that it was made of.
type row struct {
	Bench   string  `json:"bench"`
	What    string  `json:"what"`
	Ratio   float64 `json:"ratio"`
	Low     float64 `json:"ratio_low,omitempty"`
	High    float64 `json:"ratio_high,omitempty"`
	Target  float64 `json:"target,omitempty"`
	Better  better  `json:"better,omitempty"`
	Subject string  `json:"subject"`
	Peer    string  `json:"peer"`
	CPU     float64 `json:"cpu_ratio,omitempty"` // CPU time of everything involved, subject to peer
	Note    string  `json:"note,omitempty"`
}

func (r row) met() bool {
	switch r.Better {
	case higher:
		return r.Ratio >= r.Target
	case lower:
		return r.Ratio <= r.Target
	default:
		return true
	}
}

// held reports whether the ratio is good enough for a gate.
func (r row) held() bool {
	switch r.Better {
	case higher:
		return r.Ratio >= gate*r.Target
	case lower:
		return r.Ratio <= r.Target/gate
	default:
		return true
	}
}

func (r row) verdict() string {
	switch {
	case r.Better == noTarget:
		return ""
	case r.met():
		return "met"
	case r.held():
		return "near"
	default:
		return "MISSED"
	}
}

func (r row) targetText() string {
	switch r.Better {
	case higher:
		return fmt.Sprintf(">= %.2f", r.Target)
	case lower:
		return fmt.Sprintf("<= %.2f", r.Target)
	default:
		return "-"
	}
}

func (r row) ratioText() string {
	if r.Ratio == 0 && r.Better == noTarget {
		return "-" // a figure without anything to compare it with
	}
	return fmt.Sprintf("%.2f", r.Ratio)
}

// report is the result of one run.
type report struct {
	Machine rig.Machine `json:"machine"`
	Setup   setup       `json:"settings"`
	Rows    []row       `json:"rows"`
	Faults  []string    `json:"faults,omitempty"` // benches that could not be done
}

// add takes rows; one without a ratio that is a number was not measured.
func (r *report) add(rows ...row) {
	for _, x := range rows {
		if math.IsNaN(x.Ratio) || math.IsInf(x.Ratio, 0) {
			r.Faults = append(r.Faults, fmt.Sprintf("%s: %s: the ratio is %v (%s, %s)", x.Bench, x.What, x.Ratio, x.Subject, x.Peer))
			continue
		}
		if math.IsNaN(x.CPU) || math.IsInf(x.CPU, 0) {
			x.CPU = 0 // too short to have taken a measurable time
		}
		r.Rows = append(r.Rows, x)
	}
}

// within sets the spread of the ratios that a row's ratio is the median of.
func (r row) within(values []float64) row {
	s := spreadOf(values)
	if !math.IsNaN(s.Low) && !math.IsInf(s.High, 0) {
		r.Low, r.High = s.Low, s.High
	}
	return r
}

func (r *report) table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "BENCH\tWHAT\tRATIO\tLOW..HIGH\tTARGET\t\tCARREL\tPEER OR LIMIT\tCPU\tNOTE")
	for _, x := range r.Rows {
		low, cpu := "", ""
		if x.High != 0 {
			low = fmt.Sprintf("%.2f..%.2f", x.Low, x.High)
		}
		if x.CPU != 0 {
			cpu = fmt.Sprintf("%.2f", x.CPU)
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			x.Bench, x.What, x.ratioText(), low, x.targetText(), x.verdict(), x.Subject, x.Peer, cpu, x.Note)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, f := range r.Faults {
		_, _ = fmt.Fprintf(w, "\nnot measured: %s\n", f)
	}
	return nil
}

// markdown writes the table as docs/performance.md holds it.
func (r *report) markdown(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s\n\n| bench | what | ratio (low..high) | target | | Carrel | peer or limit | CPU ratio | note |\n|---|---|---|---|---|---|---|---|---|\n", r.Machine)
	for _, x := range r.Rows {
		low, cpu := "", ""
		if x.High != 0 {
			low = fmt.Sprintf(" (%.2f..%.2f)", x.Low, x.High)
		}
		if x.CPU != 0 {
			cpu = fmt.Sprintf("%.2f", x.CPU)
		}
		cells := []string{x.Bench, x.What, x.ratioText() + low, x.targetText(), x.verdict(), x.Subject, x.Peer, cpu, x.Note}
		if _, err = fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | ")); err != nil {
			return err
		}
	}
	return err
}

func (r *report) writeFile(path string, write func(io.Writer) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

func (r *report) json(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// behind returns the rows that a gate would refuse.
func (r *report) behind() []string {
	var names []string
	for _, x := range r.Rows {
		if !x.held() {
			names = append(names, x.Bench+": "+x.What)
		}
	}
	return names
}
