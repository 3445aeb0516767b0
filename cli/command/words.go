package command

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/carrel-dev/carrel/cli/output"
)

// word is an enum value as people and programs read it: `running` for WORKSPACE_STATE_RUNNING, `unknown(9)` for a
// number of a newer gateway.
func word(e protoreflect.Enum) string {
	d := e.Descriptor()
	v := d.Values().ByNumber(e.Number())
	if v == nil {
		return fmt.Sprintf("unknown(%d)", e.Number())
	}
	zero := d.Values().ByNumber(0)
	prefix := strings.TrimSuffix(string(zero.Name()), "UNSPECIFIED")
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix))
}

// moment is a time in JSON and CSV: UTC, milliseconds (RFC 3339); nil where it is absent.
type moment struct{ time.Time }

const momentLayout = "2006-01-02T15:04:05.000Z"

// MarshalJSON writes the moment.
func (m moment) MarshalJSON() ([]byte, error) { return []byte(`"` + m.String() + `"`), nil }

// String is the moment's one form.
func (m moment) String() string { return m.UTC().Format(momentLayout) }

func momentOf(t *timestamppb.Timestamp) *moment {
	if t == nil {
		return nil
	}
	return &moment{t.AsTime()}
}

func (m *moment) text() string {
	if m == nil {
		return ""
	}
	return m.String()
}

func (m *moment) stamp() string {
	if m == nil {
		return ""
	}
	return output.Stamp(m.Time)
}

// ago is the age at now; `-` where there is no moment.
func (m *moment) ago(now time.Time) string {
	if m == nil {
		return "-"
	}
	return output.Age(now.Sub(m.Time))
}

// orDash shows that a value is missing.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
