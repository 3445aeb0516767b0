package scheduler

import (
	"cmp"
	"regexp"
	"strconv"
	"strings"
)

// requirement is a parsed NVIDIA_REQUIRE_CUDA: any one of its clauses must hold, all conditions of a clause together.
// "Multiple constraints can be expressed in a single environment variable: space-separated constraints are ORed, comma-separated
// constraints are ANDed" (NVIDIA Container Toolkit, "Specialized Configurations with Docker").
type requirement struct {
	text    string
	clauses [][]condition
}

type condition struct{ name, operator, value string }

// facts is what conditions are held against. Empty fields are unknown.
type facts struct {
	cuda, driver, arch, brand string
	given                     bool // false: the host has no NVIDIA driver to ask, such as a simulated one
}

var (
	conditionPattern = regexp.MustCompile(`^(cuda|driver|arch|brand)(!=|<=|>=|=|<|>)(.+)$`)
	geforcePattern   = regexp.MustCompile(`^\d{3,4}(Ti|S|Super|D)*(-|$)`)
)

func parseRequirement(text string) requirement {
	out := requirement{text: strings.TrimSpace(text)}
	for _, clause := range strings.Fields(text) {
		var conditions []condition
		for _, word := range strings.Split(clause, ",") {
			// A word that we do not know is left to the container toolkit, which has the last word anyway.
			if m := conditionPattern.FindStringSubmatch(strings.TrimSpace(word)); m != nil {
				conditions = append(conditions, condition{m[1], m[2], m[3]})
			}
		}
		out.clauses = append(out.clauses, conditions)
	}
	return out
}

func (q requirement) empty() bool { return len(q.clauses) == 0 }

func (q requirement) holds(f facts) bool {
	if q.empty() || !f.given {
		return true
	}
	for _, clause := range q.clauses {
		if all(clause, f) {
			return true
		}
	}
	return false
}

func all(clause []condition, f facts) bool {
	for _, c := range clause {
		if !c.holds(f) {
			return false
		}
	}
	return true
}

// holds compares one condition; what is unknown about the host is not held against it.
func (c condition) holds(f facts) bool {
	have := map[string]string{"cuda": f.cuda, "driver": f.driver, "arch": f.arch, "brand": f.brand}[c.name]
	if c.name == "brand" {
		return c.brandHolds(f.brand)
	}
	if have == "" {
		return true
	}
	order := compareVersions(have, c.value)
	switch c.operator {
	case "=":
		return order == 0
	case "!=":
		return order != 0
	case "<":
		return order < 0
	case "<=":
		return order <= 0
	case ">":
		return order > 0
	default:
		return order >= 0
	}
}

// brandHolds: we know GeForce cards by their model key; of others only that they are none.
func (c condition) brandHolds(brand string) bool {
	same := strings.EqualFold(c.value, "geforce") || strings.EqualFold(c.value, "geforcertx")
	switch {
	case brand == "":
		return c.operator == "!=" || !same
	case c.operator == "!=":
		return !same
	default:
		return same
	}
}

// compareVersions compares dotted numbers, missing parts as 0, as the container toolkit does.
func compareVersions(a, b string) int {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range max(len(as), len(bs)) {
		if order := cmp.Compare(part(as, i), part(bs, i)); order != 0 {
			return order
		}
	}
	return 0
}

func part(parts []string, i int) int {
	if i >= len(parts) {
		return 0
	}
	n, err := strconv.Atoi(parts[i])
	if err != nil {
		return 0
	}
	return n
}

// facts returns what an image's requirement is held against for devices of a model on this host.
func (h *host) facts(model string) facts {
	f := facts{cuda: h.view.CUDAVersion, driver: h.view.DriverVersion, given: h.view.GPUSource == "nvml" || h.view.CUDAVersion != ""}
	if st := h.stock(model); st != nil {
		f.arch = st.capability
	}
	if geforcePattern.MatchString(model) {
		f.brand = "geforce"
	}
	return f
}
