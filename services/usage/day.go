package usage

import "time"

// Day is a calendar day of a zone: [From, To), 23 to 25 hours long where clocks change.
type Day struct {
	Name     string // such as `2026-03-29`
	From, To int64  // unix milliseconds
}

// MaxDays is the longest list of days: a hundred years.
const MaxDays = 36_600

// Days returns the days that touch [from, to), the first and the last in full.
func Days(from, to time.Time, zone *time.Location) []Day {
	var days []Day
	year, month, day := from.In(zone).Date()
	for n := 0; n < MaxDays; n++ {
		begin, end := dayStart(year, month, day+n, zone), dayStart(year, month, day+n+1, zone)
		if !begin.Before(to) {
			break
		}
		if end.After(begin) { // a zone may skip a whole day
			days = append(days, Day{Name: begin.Format(time.DateOnly), From: begin.UnixMilli(), To: end.UnixMilli()})
		}
	}
	return days
}

// dayStart is the first moment of a day. Where midnight does not exist, that is when the clocks change.
func dayStart(year int, month time.Month, day int, zone *time.Location) time.Time {
	want := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Format(time.DateOnly) // the day's number put right
	t := time.Date(year, month, day, 0, 0, 0, 0, zone)
	begin, end := t.ZoneBounds()
	if t.Format(time.DateOnly) < want {
		return end
	}
	if !begin.IsZero() && begin.Before(t) && begin.In(zone).Format(time.DateOnly) == want {
		return begin
	}
	return t
}
