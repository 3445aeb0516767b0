package command

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// window is the flags that choose a span of time.
type window struct {
	from, to, month, day, tz string
}

func (w *window) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&w.from, "from", "", "start, included: `YYYY-MM-DD`, YYYY-MM-DDTHH:MM or RFC 3339")
	fl.StringVar(&w.to, "to", "", "end, not included: as --from (default: now)")
	fl.StringVar(&w.month, "month", "", "one month: `YYYY-MM`")
	fl.StringVar(&w.day, "day", "", "one day: `YYYY-MM-DD`")
	fl.StringVar(&w.tz, "tz", "", "zone of dates and days, such as `Europe/Berlin` or UTC (default: this machine's)")
}

const (
	dateForm = "YYYY-MM-DD, YYYY-MM-DDTHH:MM[:SS] or YYYY-MM-DDTHH:MM:SS+HH:MM"
	dayForm  = "YYYY-MM-DD"
)

// resolve returns the window; to is zero for "now". Bad input names the accepted forms.
func (w window) resolve(now time.Time, getenv func(string) string) (from, to time.Time, zone *time.Location, err error) {
	none := time.Time{}
	if zone, err = parseZone(w.tz, getenv); err != nil {
		return none, none, nil, err
	}
	given := 0
	for _, set := range []bool{w.month != "", w.day != "", w.from != "" || w.to != ""} {
		if set {
			given++
		}
	}
	if given > 1 {
		return none, none, nil, usagef("use one of --month, --day, or --from and --to")
	}
	switch {
	case w.month != "":
		from, err = parseExact("--month", w.month, "2006-01", "YYYY-MM", zone)
		to = from.AddDate(0, 1, 0)
	case w.day != "":
		from, err = parseExact("--day", w.day, time.DateOnly, dayForm, zone)
		to = from.AddDate(0, 0, 1)
	default:
		from, to, err = w.fromTo(now, zone)
	}
	if err != nil {
		return none, none, nil, err
	}
	if from.After(now) {
		return none, none, nil, usagef("the window begins at %s, which is still to come", from.Format(time.RFC3339))
	}
	return from, to, zone, nil
}

func (w window) fromTo(now time.Time, zone *time.Location) (from, to time.Time, err error) {
	local := now.In(zone)
	from = time.Date(local.Year(), local.Month(), 1, 0, 0, 0, 0, zone)
	if w.from != "" {
		if from, err = parseMoment("--from", w.from, zone); err != nil {
			return from, to, err
		}
	}
	if w.to == "" {
		return from, to, nil
	}
	if to, err = parseMoment("--to", w.to, zone); err != nil {
		return from, to, err
	}
	if !to.After(from) {
		return from, to, usagef("--to %s is not after the start %s; the end is not included", to.Format(time.RFC3339), from.Format(time.RFC3339))
	}
	return from, to, nil
}

func parseExact(flag, s, layout, form string, zone *time.Location) (time.Time, error) {
	t, err := time.ParseInLocation(layout, s, zone)
	if err != nil || t.Format(layout) != s {
		return time.Time{}, usagef("%s %q: use %s, an existing date", flag, s, form)
	}
	return t, nil
}

func parseMoment(flag, s string, zone *time.Location) (time.Time, error) {
	for _, layout := range []string{time.DateOnly, "2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04", "2006-01-02 15:04:05"} {
		if t, err := time.ParseInLocation(layout, s, zone); err == nil {
			return t, nil
		}
	}
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return t.In(zone), nil
	}
	return time.Time{}, usagef("%s %q: use %s, an existing date", flag, s, dateForm)
}

var zonePattern = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$`)

// parseZone returns a zone by its IANA name; empty: the machine's, UTC where that has no name.
func parseZone(name string, getenv func(string) string) (*time.Location, error) {
	if name == "" {
		if z, err := loadZone(localZone(getenv)); err == nil {
			return z, nil
		}
		return time.UTC, nil
	}
	z, err := loadZone(name)
	if err != nil {
		return nil, usagef("--tz %q: use a zone's IANA name, such as Europe/Berlin, America/New_York or UTC", name)
	}
	return z, nil
}

func loadZone(name string) (*time.Location, error) {
	if !zonePattern.MatchString(name) || name == "Local" {
		return nil, usagef("zone %q", name)
	}
	return time.LoadLocation(name)
}

// localZone is the IANA name of this machine's zone: TZ, or where /etc/localtime leads to.
func localZone(getenv func(string) string) string {
	if tz := strings.TrimPrefix(getenv("TZ"), ":"); tz != "" {
		return tz
	}
	target, err := os.Readlink("/etc/localtime")
	if err != nil {
		return ""
	}
	_, name, _ := strings.Cut(filepath.ToSlash(target), "zoneinfo/")
	return name
}
