// Asks for news of the run every two seconds, and draws them into the same page.
(() => {
  let revision = 0, layout = "";

  function show(state) {
    document.title = state.title;
    document.querySelector("header").innerHTML = state.header;
    const wanted = JSON.stringify(state.layout);
    if (wanted !== layout) {
      layout = wanted;
      document.querySelector("main").innerHTML = state.main;
      lockstep.bind();
    }
    state.charts.forEach((chart) => {
      const says = document.getElementById(`${chart.name}-says`);
      if (says) says.textContent = chart.says;
    });
    lockstep.show(state.charts);
  }

  function complain(text) {
    let place = document.getElementById("problem");
    if (!place) {
      place = document.createElement("p");
      place.id = "problem";
      place.className = "warning";
      place.setAttribute("role", "status");
      document.querySelector("main").before(place);
    }
    place.textContent = text;
    place.hidden = !text;
  }

  async function look() {
    try {
      const state = await (await fetch(`state?revision=${revision}`)).json();
      if (state.charts) show(state);
      revision = state.revision;
      complain(state.problem || "");
    } catch {
      complain("There is no answer; `lockstep watch --web` has ended, or this machine sleeps.");
    }
    setTimeout(look, 2000);
  }
  look();
})();
